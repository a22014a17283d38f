"""The parser of vLLM's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_sched.workers.flags import (
    absolute_config,
    flag_names,
    int_value,
    json_key,
    last_value,
    parse,
)


def test_parsed_flags_keep_all_words() -> None:
    words = ["model", "--a-b", "1", "--c_d=2", "--switch", "--e", "x", "y"]
    flags = list(parse(words))
    assert [word for flag in flags for word in flag.words] == words
    assert [(flag.name, flag.value) for flag in flags] == [
        ("", "model"), ("--a-b", "1"), ("--c-d", "2"), ("--switch", None), ("--e", "x"), ("", "y"),
    ]  # fmt: skip
    assert flag_names(words) == {"--a-b", "--c-d", "--switch", "--e"}


def test_dotted_key_belongs_to_its_flag() -> None:
    words = ["model", "--a.b_c", "1", "--d_e.f.g=2", "--a-b", "3.5", "x.y"]
    assert [flag.whole for flag in parse(words)] == ["", "--a", "--d-e", "--a-b", ""]


def test_last_of_several_values_counts() -> None:
    words = ["--max-model-len", "10", "--max_model_len=20"]
    assert last_value(words, "--max-model-len") == "20"
    assert int_value(words, "--max-model-len") == 20
    assert last_value(words, "--other") is None
    assert int_value(["--max-model-len", "16k"], "--max-model-len") is None
    assert int_value(["--max-model-len", "9" * 5000], "--max-model-len") is None


def test_short_names_are_expanded() -> None:
    words = ["--enforce-eager", "-tp", "4", "-pp=2", "--seed", "-1"]
    flags = list(parse(words))
    assert [word for flag in flags for word in flag.words] == words
    assert [(flag.name, flag.value) for flag in flags] == [
        ("--enforce-eager", None), ("--tensor-parallel-size", "4"),
        ("--pipeline-parallel-size", "2"), ("--seed", "-1"),
    ]  # fmt: skip


def test_short_names_in_all_spellings_are_no_values() -> None:
    words = ["--enforce-eager", "-O3", "--seed", "-.5", "-sc.num_x=3", "-cc.mode", "3", "-q", "-n"]
    flags = list(parse(words))
    assert [word for flag in flags for word in flag.words] == words
    assert [(flag.name, flag.value) for flag in flags] == [
        ("--enforce-eager", None), ("-O3", None), ("--seed", "-.5"),
        ("--speculative-config.num-x", "3"), ("--compilation-config.mode", "3"),
        ("--quantization", None), ("-n", None),
    ]  # fmt: skip
    assert last_value(["--chat-template", "-a b"], "--chat-template") == "-a b"
    assert json_key(["--enable-lora", "-sc.num_x=3"], "--speculative-config", "num_x") == 3


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["--spec", '{"method": "ngram"}'], "ngram"),
        (["--spec.method", "ngram"], "ngram"),
        (["--spec", "{"], None),
        (["--spec", "[1]"], None),
        ([], None),
    ],
)
def test_key_of_an_object_flag(words: list[str], method: str | None) -> None:
    assert json_key(words, "--spec", "method") == method


def test_config_option_is_rewritten_as_vllm_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flags.yaml"
    file.touch()
    monkeypatch.chdir(tmp_path)
    named = ["--seed", "1", "--config", str(file), "--enforce-eager"]
    for spelling in (["--config=flags.yaml"], ["--config", "flags.yaml"], [f"--config={file}"]):
        assert absolute_config(["--seed", "1", *spelling, "--enforce-eager"]) == named
    assert absolute_config(["--config=not/here.yaml"]) == ["--config", "not/here.yaml"]
    assert absolute_config(["--config"]) == ["--config"]

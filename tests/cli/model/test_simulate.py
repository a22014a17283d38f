"""`vllm-sched simulate`: output, files and refusals."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Printed, Program
from vllm_sched.cli import exits, progress_bar
from vllm_sched.cli.model import simulate
from vllm_sched.sim.engines import exact_engine

FLEET = """
model: m
workers:
  - {name: s0, role: short, profile: h100-8b, max_model_len: 12000}
  - {name: l0, role: long, profile: h100-8b, launch: {policies: {long_prompt: {}}}}
"""
TENANTS = "tenants:\n  - {name: tenant-1, keys_env: NONE}\n"
LOAD = ["--workload", "azure-conv:0.9,mooncake-conv:0.1", "--request-rate", "10"]
FLUID = ["--engine", "fluid"]
Simulated = Callable[..., tuple[Printed, dict[str, Any]]]


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


@pytest.fixture
def simulated(program: Program, fleet: Path) -> Simulated:
    """Return a function that simulates the fleet and returns the output and the saved result."""

    def run(*words: object, status: int = 0) -> tuple[Printed, dict[str, Any]]:
        save = fleet.with_name("out.json")
        printed = program("simulate", fleet, *words, "--save", save, status=status)
        return printed, json.loads(save.read_text())

    return run


def trace_of(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.usefixtures("svg_only")
@pytest.mark.parametrize("engine", ["exact", "fluid"])
def test_simulate_prints_figures_and_writes_files(
    engine: str, simulated: Simulated, tmp_path: Path
) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "pictures"
    printed, result = simulated(
        *LOAD, "--num-requests", "40", "--seed", "3", "--engine", engine, "--tenants", "2",
        "--goodput", "ttft:60000", "itl:60000", "--plot", plot, "--trace", trace,
    )  # fmt: skip
    for word in ("azure-conv", "mooncake-conv", "goodput", "100 %", "times faster than real time"):
        assert word in printed.out
    assert (result["completed"], result["failed"], result["request_rate"]) == (40, 0, 10)
    assert result["backend"] == f"simulated-{engine}"
    assert set(result["classes"]) == {"azure-conv", "mooncake-conv"}
    assert len(result["ttfts"]) == len(result["itls"]) == 40
    assert sum(map(len, result["itls"])) == result["total_output_tokens"] - 40
    facts = result["simulator"]
    assert facts["profiles"] == {"s0": "h100-8b", "l0": "h100-8b"}
    assert facts["workers"].keys() == {"s0", "l0"}
    assert (facts["scheduler_share"] is not None) == (engine == "exact")
    assert json.loads(trace.read_text())["traceEvents"]
    steps = {"steps-s0", "steps-l0"} if engine == "exact" else set()
    assert {path.stem for path in plot.iterdir()} == {"ttft", "itl", "tenants", "router", *steps}


@pytest.mark.usefixtures("svg_only")
def test_gaps_are_not_recorded_for_many_requests(
    simulated: Simulated, program: Program, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "MAX_FINE_REQUESTS", 10)
    words = [*LOAD, "--num-requests", "20"]
    line = program.refusal("simulate", fleet, *words, *FLUID, "--goodput", "itl:300")
    assert "--goodput itl: above 10 requests" in line
    printed, result = simulated(*words, *FLUID, "--plot", fleet.with_name("pictures"))
    assert "- / -" in printed.out
    assert result["p99_itl_ms"] is None
    assert result["p99_tpot_ms"] > 0
    simulated(*words, "--engine", "exact", "--goodput", "itl:60000")


def test_same_seed_gives_the_same_result(simulated: Simulated) -> None:
    def once(seed: str) -> dict[str, object]:
        _, found = simulated(*LOAD, "--num-requests", "6", "--seed", seed)
        return {key: found[key] for key in ("ttfts", "itls", "latencies", "workers_of")}

    assert once("1") == once("1") != once("2")


def test_profile_option_applies_to_workers_without_one(program: Program, fleet: Path) -> None:
    fleet.write_text("model: m\nworkers:\n  - {name: w0, url: http://127.0.0.1:9}\n")
    words = ["simulate", fleet, "--workload", "100x5", "--concurrency", "2", "--num-requests", "5"]
    assert "workers[0].profile: is missing; name a machine" in program.refusal(*words)
    program(*words, "--profile", "h200-8b")


def test_profile_option_without_effect_is_refused(program: Program, fleet: Path) -> None:
    line = program.refusal("simulate", fleet, *LOAD, "--profile", "h200-8b")
    assert "--profile h200-8b: has no effect, because every worker in" in line


@pytest.mark.usefixtures("svg_only")
def test_ignored_settings_are_reported(program: Program, fleet: Path) -> None:
    fleet.write_text(FLEET.replace("long_prompt: {}", "lanes: {}") + TENANTS)
    words = ["simulate", fleet, *LOAD, "--num-requests", "5", "--tenants", "3"]
    printed = program(*words, *FLUID).words
    assert "--engine fluid ignores lanes" in printed
    assert "2 of --tenants 3 (named tenant-1 and so on) are not in the fleet file" in printed
    assert "fluid ignores" not in program(*words).out


def test_long_prefill_token_threshold_is_simulated_or_reported(
    simulated: Simulated, fleet: Path
) -> None:
    def longest_gap(engine: str, *args: str) -> tuple[float, str]:
        worker = {"name": "w0", "profile": "h100-8b", "launch": {"args": list(args)}}
        fleet.write_text(json.dumps({"model": "m", "workers": [worker]}))
        words = ["--workload", "300x60:0.8,20000x5:0.1", "--num-requests", "20"]
        printed, result = simulated(*words, "--request-rate", "4", "--engine", engine)
        return max(gap for each in result["itls"] for gap in each), printed.words

    limit = "--long-prefill-token-threshold=512"
    (without, _), (within, printed) = longest_gap("exact"), longest_gap("exact", limit)
    assert within < 0.5 * without
    assert "use exact" not in printed
    gap, printed = longest_gap("fluid", limit)
    assert gap == longest_gap("fluid")[0]
    assert "--engine fluid ignores w0's --long-prefill-token-threshold 512; use" in printed


def test_progress_is_printed_as_lines_without_a_terminal(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.0)
    printed, _ = simulated(*LOAD, "--num-requests", "40", *FLUID)
    began, *progress = printed.err.splitlines()
    assert began.startswith("vllm-sched simulate: azure-conv:0.9,mooncake-conv:0.1, workers: 2, ")
    assert len(progress) > 1
    assert all(re.search(r"\d virtual s, \d+ done, \d+ in flight$", line) for line in progress)


@pytest.mark.usefixtures("default_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_simulation_saves_partial_results(
    number: int, simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(_completed: float, state: str, *, last: bool) -> None:
        waits = last or " 0 done" in state
        if not waits and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            signal.raise_signal(number)

    monkeypatch.setattr(simulate, "progress", lambda *_, **__: nullcontext(press))
    trace = tmp_path / "trace.json"
    words = [*LOAD, "--num-requests", "9000", *FLUID, "--trace", trace]
    printed, kept = simulated(*words, status=130)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert printed.out.startswith("interrupted: partial results")
    assert "interrupted" not in printed.err
    assert kept["completed"] > 0
    assert kept["interrupted"] > 0
    assert kept["completed"] + kept["interrupted"] < 9000
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.usefixtures("default_ctrl_c")
def test_interrupt_before_the_first_result_keeps_the_older_file(
    program: Program, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def at_once() -> Iterator[Callable[[], bool]]:
        with exits.interruptible() as stopped:
            signal.raise_signal(signal.SIGINT)
            yield stopped

    monkeypatch.setattr(simulate, "interruptible", at_once)
    save = tmp_path / "out.json"
    save.write_text("older")
    words = ["--workload", "100x1000", "--concurrency", "4", "--num-requests", "90"]
    printed = program("simulate", fleet, *words, *FLUID, "--save", save, status=130)
    assert printed.out == ""
    assert re.search(r" 0 done, [1-9]\d* in flight\n", printed.err)
    assert printed.err.splitlines()[-1] == "vllm-sched simulate: interrupted"
    assert save.read_text() == "older"


@pytest.mark.usefixtures("default_ctrl_c")
def test_second_interrupt_ends_the_simulation(
    program: Program, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object, last: bool) -> None:
        assert not last
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(simulate, "progress", lambda *_, **__: nullcontext(press))
    words = [*LOAD, "--num-requests", "9000", *FLUID]
    line = program.refusal("simulate", fleet, *words, status=130)
    assert line == "vllm-sched simulate: interrupted"


def test_class_names_with_markup_are_shown_unchanged(
    program: Program, fleet: Path, tmp_path: Path
) -> None:
    """Neither rich nor matplotlib interprets the names as markup."""
    names = ("[/b]", "$\\frac$", "[red]", "_x", "\U0001fae0")
    line = {"input_length": 700, "output_length": 5}
    lines = [line | {"timestamp": 1000 * at, "class": name} for at, name in enumerate(names)]
    words = ["--workload", trace_of(tmp_path, *lines), *FLUID, "--plot", tmp_path / "pictures"]
    printed = program("simulate", fleet, *words)
    drawn = (tmp_path / "pictures" / "ttft.svg").read_text()
    assert [name for name in names if name not in printed.out or f"{name} (1)" not in drawn] == []
    assert "missing from" not in printed.err


@pytest.mark.parametrize("option", ["--save", "--trace"])
def test_full_disk_is_reported_after_the_figures(
    option: str, program: Program, fleet: Path
) -> None:
    words = ["--workload", "100x5", "--num-requests", "5", *FLUID, option, "/dev/full"]
    printed = program("simulate", fleet, *words, status=2)
    assert "requests done" in printed.out
    last = printed.err.splitlines()[-1]
    assert last == "vllm-sched simulate: /dev/full: No space left on device"


def test_failed_requests_are_printed_and_exit_code_is_1(program: Program, fleet: Path) -> None:
    words = ["--workload", "100x2000", "--concurrency", "1", "--num-requests", "2"]
    printed = program("simulate", fleet, *words, "--timeout", "1", status=1)
    assert "2 failed: no complete response within 1 s" in printed.out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("short, profile: h100-8b", "short, profile: h100-9b", "has model=9b; valid here: llama-3"),
        ("12000", "900000", "less than one request of max_model_len 900,000"),
        ("long_prompt", "longprompt", "unknown policy 'longprompt'"),
        (
            "long_prompt: {}", "deferred_prefill: {departures: 9000}",
            "worker l0: deferred_prefill.departures=9000 is out of range",
        ),
        ("model: m", "model: m\nrouter: 5", "router"),
        ("model: m", "model: m\ntransfer: nixl", "no worker has the role prefill or decode"),
    ],
)  # fmt: skip
def test_invalid_fleet_is_refused(
    old: str, new: str, message: str, program: Program, fleet: Path
) -> None:
    assert FLEET.count(old) == 1
    fleet.write_text(FLEET.replace(old, new))
    assert message in program.refusal("simulate", fleet, "--num-requests", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workload nonsense", "unknown workload 'nonsense'"),
        ("--workload none.jsonl", "none.jsonl: No such file"),
        ("--num-requests 0", "--num-requests 0: must be more than 0"),
        ("--request-rate inf", "--request-rate inf: give a number"),
        ("--timeout 0", "--timeout 0: must be a number, more than 0"),
        ("--timeout nan", "--timeout nan: must be a number, more than 0"),
        ("--bandwidth nan", "--bandwidth nan: must be a number, more than 0"),
        ("--front-ms nan", "--front-ms nan: must be a number, 0 or more"),
        ("--mixed-ms inf", "--mixed-ms inf: must be a number, 0 or more"),
        ("--front-ms -1", "--front-ms -1: must be"),
        ("--mixed-ms 1e300", "--mixed-ms 1e+300: must be a number, 0 or more, at most"),
        ("--goodput speed:3", "unknown target"),
        ("--save nowhere/at/all.json", "there is no folder nowhere/at"),
        ("--trace nowhere/at/all.json", "there is no folder nowhere/at"),
        ("--save .", ".: is a folder; name a file in it"),
        ("--duration 1e9", "requests: a run has at most 10,000,000"),
        ("--workload agent-coding --prefix-hit 0.3", "--prefix-hit: sessions have prefixes of"),
    ],
)
def test_invalid_option_is_refused(words: str, message: str, program: Program, fleet: Path) -> None:
    assert message in program.refusal("simulate", fleet, *words.split())


@pytest.mark.usefixtures("svg_only")
def test_file_names_that_are_not_utf8_are_escaped(
    program: Program, fleet: Path, tmp_path: Path
) -> None:
    trace, save, plot = (
        tmp_path / os.fsdecode(name) for name in (b"t\xff.jsonl", b"s\xff.json", b"p\xff")
    )
    trace_of(tmp_path, {"timestamp": 0, "input_length": 700, "output_length": 5}).rename(trace)
    printed = program(
        "simulate", fleet, "--workload", trace, *FLUID, "--save", save, "--plot", plot
    )
    assert "s\\udcff.json" in printed.out
    assert json.loads(save.read_text())["label"] == r"t\xff"
    assert (plot / "ttft.svg").exists()


def test_model_without_a_worker_is_refused(program: Program, fleet: Path) -> None:
    fleet.write_text("model: m\nworkers:\n  - {name: w0, model: other, profile: h100-8b}\n")
    line = program.refusal("simulate", fleet)
    assert "model: 'm': requests ask for this model" in line


def test_fluid_engine_works_without_vllm(
    program: Program, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_engine, "find_spec", lambda _: None)
    words = ["simulate", fleet, "--workload", "100x5", "--num-requests", "5"]
    assert "vLLM is not installed" in program.refusal(*words)
    program(*words, *FLUID)


def test_only_simulate_accepts_a_worker_without_url(
    program: Program, fleet: Path, tmp_path: Path
) -> None:
    assert "none: simulation only" in program("check", fleet).out
    missing = "workers[0].url: is missing"
    assert missing in program("router", fleet, status=2).err
    printed = program("up", fleet, "--log-dir", tmp_path, status=2)
    assert f"{missing}, and there is no launch: block" in printed.err


def test_sessions_of_a_trace_are_played_and_reported(simulated: Simulated, tmp_path: Path) -> None:
    first = {"input_length": 2048, "output_length": 20, "hash_ids": [1, 2], "timestamp": 0}
    later = {"input_length": 300, "output_length": 10, "delay": 1500}
    lines = ({"session_id": name, **entry} for entry in (first, later) for name in ("a", "b"))
    words = ["--workload", trace_of(tmp_path, *lines), "--concurrency", "1", *FLUID]
    printed, result = simulated(*words)
    assert "tasks finished 2" in printed.words
    assert result["start_times"][0] == 0.0
    assert result["sessions_of"] == ["a", "a", "b", "b"]
    assert result["turns_of"] == [0, 1, 0, 1]
    assert result["context_lens"] == [0, 2068, 0, 2068]
    assert result["sessions"]["finished"] == 2
    assert all(task["task_s"] > 1.5 for task in result["sessions"]["tasks"])

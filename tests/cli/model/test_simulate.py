"""`vllm-sched simulate`: output, files and refusals."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from vllm_sched.cli import exits, progress_bar
from vllm_sched.cli.main import main
from vllm_sched.cli.model import simulate

FLEET = """
model: m
workers:
  - {name: s0, role: short, profile: h100-8b, max_model_len: 12000}
  - {name: l0, role: long, profile: h100-8b, launch: {policies: {long_prompt: {}}}}
"""
TENANTS = "tenants:\n  - {name: tenant-1, keys_env: NONE}\n"
LOAD = ["--workload", "azure-conv:0.9,mooncake-conv:0.1", "--request-rate", "10"]


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


@pytest.mark.usefixtures("svg_only")
@pytest.mark.parametrize("engine", ["exact", "fluid"])
def test_simulate_prints_figures_and_writes_files(
    engine: str, fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, trace, plot = (tmp_path / name for name in ("out.json", "trace.json", "pictures"))
    words = [
        *LOAD, "--num-requests", "40", "--seed", "3", "--engine", engine, "--tenants", "2",
        "--goodput", "ttft:60000", "itl:60000", "--save", str(save), "--plot", str(plot),
        "--trace", str(trace),
    ]  # fmt: skip
    assert main(["simulate", str(fleet), *words]) == 0
    out = capsys.readouterr().out
    for word in ("azure-conv", "mooncake-conv", "goodput", "100 %", "times faster than real time"):
        assert word in out
    result = json.loads(save.read_text())
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
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "MAX_FINE_REQUESTS", 10)
    save, plot = tmp_path / "out.json", tmp_path / "pictures"
    words = ["simulate", str(fleet), *LOAD, "--num-requests", "20", "--engine", "fluid"]
    assert main([*words, "--goodput", "itl:300"]) == 2
    assert "--goodput itl: above 10 requests" in capsys.readouterr().err
    assert main([*words, "--save", str(save), "--plot", str(plot)]) == 0
    assert "- / -" in capsys.readouterr().out
    result = json.loads(save.read_text())
    assert result["p99_itl_ms"] is None
    assert result["p99_tpot_ms"] > 0
    assert main([*words, "--seed", "0", "--engine", "exact", "--goodput", "itl:60000"]) == 0


def test_same_seed_gives_the_same_result(fleet: Path, tmp_path: Path) -> None:
    def once(name: str, seed: str) -> dict[str, object]:
        words = [*LOAD, "--num-requests", "6", "--seed", seed, "--save", str(tmp_path / name)]
        assert main(["simulate", str(fleet), *words]) == 0
        found: dict[str, object] = json.loads((tmp_path / name).read_text())
        return {key: found[key] for key in ("ttfts", "itls", "latencies", "workers_of")}

    assert once("a.json", "1") == once("b.json", "1") != once("c.json", "2")


def test_profile_option_applies_to_workers_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("model: m\nworkers:\n  - {name: w0, url: http://127.0.0.1:9}\n")
    words = ["simulate", str(path), "--workload", "100x5", "--concurrency", "2"]
    assert main([*words, "--num-requests", "5"]) == 2
    assert "workers[0].profile: is missing; name a machine" in capsys.readouterr().err
    assert main([*words, "--num-requests", "5", "--profile", "h200-8b"]) == 0


@pytest.mark.usefixtures("svg_only")
def test_ignored_settings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.replace("long_prompt: {}", "lanes: {}") + TENANTS)
    words = ["simulate", str(path), *LOAD, "--num-requests", "5", "--tenants", "3"]
    assert main([*words, "--engine", "fluid"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--engine fluid ignores lanes" in printed
    assert "2 of --tenants 3 (named tenant-1 and so on) are not in the fleet file" in printed
    assert main([*words, "--plot", str(tmp_path / "pictures")]) == 0
    assert "fluid ignores" not in capsys.readouterr().out
    # With real schedulers each step is drawn.
    assert any(each.name.startswith("steps-") for each in (tmp_path / "pictures").iterdir())


def test_long_prefill_token_threshold_is_simulated_or_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def longest_gap(engine: str, *args: str) -> tuple[float, str]:
        path, save = tmp_path / "fleet.yaml", tmp_path / "out.json"
        worker = {"name": "w0", "profile": "h100-8b", "launch": {"args": list(args)}}
        path.write_text(json.dumps({"model": "m", "workers": [worker]}))
        words = ["--workload", "300x60:0.8,20000x5:0.1", "--num-requests", "20"]
        words += ["--request-rate", "4", "--engine", engine, "--save", str(save)]
        assert main(["simulate", str(path), *words]) == 0
        gaps = (gap for each in json.loads(save.read_text())["itls"] for gap in each)
        return max(gaps), " ".join(capsys.readouterr().out.split())

    limit = "--long-prefill-token-threshold=512"
    (without, _), (within, printed) = longest_gap("exact"), longest_gap("exact", limit)
    assert within < 0.5 * without
    assert "use exact" not in printed
    gap, printed = longest_gap("fluid", limit)
    assert gap == longest_gap("fluid")[0]
    assert "--engine fluid ignores w0's --long-prefill-token-threshold 512; use" in printed


def test_progress_is_printed_as_lines_without_a_terminal(
    fleet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.0)
    words = [*LOAD, "--num-requests", "40", "--engine", "fluid"]
    assert main(["simulate", str(fleet), *words]) == 0
    began, *progress = capsys.readouterr().err.splitlines()
    assert began.startswith("vllm-sched simulate: azure-conv:0.9,mooncake-conv:0.1, workers: 2, ")
    assert len(progress) > 1
    assert all(re.search(r"\d virtual s, \d+ done, \d+ in flight$", line) for line in progress)


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    """Restore the default Ctrl-C handler, which earlier tests may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_simulation_saves_partial_results(
    number: int,
    fleet: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def press(_completed: float, state: str, *, last: bool) -> None:
        waits = last or " 0 done" in state
        if not waits and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            signal.raise_signal(number)

    monkeypatch.setattr(simulate, "progress", lambda *_, **__: nullcontext(press))
    save, trace = tmp_path / "out.json", tmp_path / "trace.json"
    words = [*LOAD, "--num-requests", "9000", "--engine", "fluid"]
    words += ["--save", str(save), "--trace", str(trace)]
    assert main(["simulate", str(fleet), *words]) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    printed = capsys.readouterr()
    assert printed.out.startswith("interrupted: partial results")
    assert "interrupted" not in printed.err
    kept = json.loads(save.read_text())
    assert kept["completed"] > 0
    assert kept["interrupted"] > 0
    assert kept["completed"] + kept["interrupted"] < 9000
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.usefixtures("default_ctrl_c")
def test_interrupt_before_the_first_result_keeps_the_older_file(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    words += ["--engine", "fluid", "--save", str(save)]
    assert main(["simulate", str(fleet), *words]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(r" 0 done, [1-9]\d* in flight\n", printed.err)
    assert printed.err.splitlines()[-1] == "vllm-sched simulate: interrupted"
    assert save.read_text() == "older"


@pytest.mark.usefixtures("default_ctrl_c")
def test_second_interrupt_ends_the_simulation(
    fleet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object, last: bool) -> None:
        assert not last
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(simulate, "progress", lambda *_, **__: nullcontext(press))
    words = [*LOAD, "--num-requests", "9000", "--engine", "fluid"]
    assert main(["simulate", str(fleet), *words]) == 130
    assert capsys.readouterr().err == "vllm-sched simulate: interrupted\n"


def test_class_names_with_markup_are_shown_unchanged(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither rich nor matplotlib interprets the names as markup."""
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "pictures"
    lines = (
        {"timestamp": 1000 * at, "input_length": 700, "output_length": 5, "class": name}
        for at, name in enumerate(("[/b]", "$\\frac$", "[red]", "_x", "\U0001fae0"))
    )
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = ["--workload", str(trace), "--engine", "fluid", "--plot", str(plot)]
    assert main(["simulate", str(fleet), *words]) == 0
    printed = capsys.readouterr().out
    drawn = (plot / "ttft.svg").read_text()
    for name in ("[/b]", "$\\frac$", "[red]", "_x", "\U0001fae0"):
        assert name in printed
        assert f"{name} (1)" in drawn
    assert "missing from" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--trace"])
def test_full_disk_is_reported_in_one_line_after_the_figures(
    option: str, fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workload", "100x5", "--num-requests", "5", "--engine", "fluid"]
    assert main(["simulate", str(fleet), *words, option, "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "requests done" in printed.out
    last = printed.err.splitlines()[-1]
    assert last == "vllm-sched simulate: /dev/full: No space left on device"


def test_failed_requests_are_printed_and_exit_code_is_1(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workload", "100x2000", "--concurrency", "1", "--num-requests", "2"]
    assert main(["simulate", str(fleet), *words, "--timeout", "1"]) == 1
    assert "2 failed: no complete response within 1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (FLEET.replace("h100-8b", "h100-9b", 1), [], "unknown profile 'h100-9b'; valid: a100-8b"),
        (FLEET.replace("12000", "900000"), [], "less than one request of max_model_len 900,000"),
        (FLEET.replace("long_prompt", "longprompt"), [], "unknown policy 'longprompt'"),
        (
            FLEET.replace("long_prompt: {}", "deferred_prefill: {departures: 9000}"),
            ["--num-requests", "1"],
            "worker l0: deferred_prefill.departures=9000 is out of range",
        ),
        (FLEET.replace("model: m", "model: m\nrouter: 5"), [], "router"),
        (FLEET + "transfer: nixl\n", [], "no worker has the role prefill or decode"),
        (FLEET, ["--workload", "nonsense"], "unknown workload 'nonsense'"),
        (FLEET, ["--workload", "none.jsonl"], "none.jsonl: No such file"),
        (FLEET, ["--num-requests", "0"], "--num-requests 0: must be more than 0"),
        (FLEET, ["--request-rate", "inf"], "--request-rate inf: give a number"),
        (FLEET, ["--timeout", "0"], "--timeout 0: must be a number, more than 0"),
        (FLEET, ["--timeout", "nan"], "--timeout nan: must be a number, more than 0"),
        (FLEET, ["--bandwidth", "nan"], "--bandwidth nan: must be a number, more than 0"),
        (FLEET, ["--front-ms", "nan"], "--front-ms nan: must be a number, 0 or more"),
        (FLEET, ["--mixed-ms", "inf"], "--mixed-ms inf: must be a number, 0 or more"),
        (FLEET, ["--front-ms", "-1"], "--front-ms -1: must be"),
        (FLEET, ["--mixed-ms", "1e300"], "--mixed-ms 1e+300: must be a number, 0 or more, at most"),
        (FLEET, ["--goodput", "speed:3"], "unknown target"),
        (FLEET, ["--save", "nowhere/at/all.json"], "there is no folder nowhere/at"),
        (FLEET, ["--trace", "nowhere/at/all.json"], "there is no folder nowhere/at"),
        (FLEET, ["--save", "."], ".: is a folder; name a file in it"),
        (FLEET, ["--duration", "1e9"], "requests: a run has at most 10,000,000"),
    ],
)
def test_invalid_input_is_refused_in_one_line(
    text: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert main(["simulate", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_invalid_trace_line_is_named(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5}\n{"timestamp": 1}\n')
    assert main(["simulate", str(fleet), "--workload", str(trace)]) == 2
    assert "line 2: input_length is missing" in capsys.readouterr().err


def test_trace_is_played_at_its_own_times(fleet: Path, tmp_path: Path) -> None:
    trace, save = tmp_path / "trace.jsonl", tmp_path / "out.json"
    lines = (
        {"timestamp": at, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
        for at in (1000, 1500, 3000)
    )
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main(["simulate", str(fleet), "--workload", str(trace), "--save", str(save)]) == 0
    result = json.loads(save.read_text())
    assert result["start_times"] == [0.0, 0.5, 2.0]
    assert result["output_lens"] == [5, 5, 5]


@pytest.mark.usefixtures("svg_only")
def test_file_names_that_are_not_utf8_are_escaped(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, save, plot = (
        tmp_path / os.fsdecode(name) for name in (b"t\xff.jsonl", b"s\xff.json", b"p\xff")
    )
    trace.write_text('{"timestamp": 0, "input_length": 700, "output_length": 5}\n')
    words = ["--workload", str(trace), "--engine", "fluid", "--save", str(save)]
    assert main(["simulate", str(fleet), *words, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "s\\udcff.json" in printed
    assert json.loads(save.read_text())["label"] == r"t\xff"
    assert (plot / "ttft.svg").exists()


def test_model_without_a_worker_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("model: m\nworkers:\n  - {name: w0, model: other, profile: h100-8b}\n")
    assert main(["simulate", str(path)]) == 2
    assert "model: 'm': requests ask for this model" in capsys.readouterr().err


def test_fluid_engine_works_without_vllm(
    fleet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "find_spec", lambda _: None)
    words = ["simulate", str(fleet), "--workload", "100x5", "--num-requests", "5"]
    assert main(words) == 2
    assert "vLLM is not installed" in capsys.readouterr().err
    assert main([*words, "--engine", "fluid"]) == 0


# Commands that need a real worker


def test_check_marks_a_worker_for_simulation_only(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(fleet)]) == 0
    assert "none: simulation only" in capsys.readouterr().out


def test_router_and_up_refuse_a_simulation_only_worker(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", str(fleet)]) == 2
    assert "workers[0].url: is missing" in capsys.readouterr().err
    assert main(["up", str(fleet), "--log-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "workers[0].url: is missing, and there is no launch: block" in error


def test_sessions_of_a_trace_are_played_and_reported(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, save = tmp_path / "agents.jsonl", tmp_path / "out.json"
    first = {"input_length": 2048, "output_length": 20, "hash_ids": [1, 2], "timestamp": 0}
    later = {"input_length": 300, "output_length": 10, "delay": 1500}
    lines = [{"session_id": name, **entry} for entry in (first, later) for name in ("a", "b")]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--workload", str(trace), "--concurrency", "1", "--engine", "fluid"]
    assert main(["simulate", str(fleet), *words, "--save", str(save)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tasks finished 2" in out
    result = json.loads(save.read_text())
    assert result["sessions_of"] == ["a", "a", "b", "b"]
    assert result["turns_of"] == [0, 1, 0, 1]
    assert result["context_lens"] == [0, 2068, 0, 2068]
    assert result["sessions"]["finished"] == 2
    assert all(task["task_s"] > 1.5 for task in result["sessions"]["tasks"])


def test_sessions_have_prefixes_of_their_own(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workload", "agent-coding", "--prefix-hit", "0.3"]
    assert main(["simulate", str(fleet), *words]) == 2
    assert "--prefix-hit: sessions have prefixes of their own" in capsys.readouterr().err

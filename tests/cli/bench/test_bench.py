"""`vllm-sched bench` against a fake endpoint."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.bench.fake_openai import FakeOpenAI
from tests.cli.bench.endpoint import run_until_stopped, running
from tests.cli.program import Program
from vllm_sched.bench.client.endpoint import NO_COUNT, NO_IGNORE_EOS
from vllm_sched.bench.traffic.traces import RequestTrace
from vllm_sched.cli import progress_bar
from vllm_sched.cli.bench import load

SHORT = ["--workload", "20x3"]


@pytest.mark.usefixtures("svg_only")
def test_run_prints_figures_and_writes_files(tmp_path: Path, program: Program) -> None:
    save, plot = tmp_path / "out.json", tmp_path / "pictures"
    words = [
        "--workload", "azure-conv:1,azure-code:1", "--request-rate", "100", "--num-requests",
        "40", "--scale", "0.05", "--tenants", "3", "--goodput", "ttft:5000", "itl:5000",
        "--save", save, "--plot", plot, "--seed", "4",
    ]  # fmt: skip
    with running(FakeOpenAI(workers=("s0", "l0"))) as fake:
        out = program("bench", "--url", fake.url, *words).out
    for word in ("azure-conv", "azure-code", "all", "goodput", "100 %", "40 requests sent"):
        assert word in out
    result = json.loads(save.read_text())
    assert (result["completed"], result["failed"], result["request_rate"]) == (40, 0, 100)
    assert set(result["classes"]) == {"azure-conv", "azure-code"}
    assert sum(figures["completed"] for figures in result["classes"].values()) == 40
    assert set(result["tenants_of"]) == {"tenant-1", "tenant-2", "tenant-3"}
    assert set(result["workers_of"]) == {"s0", "l0"}
    assert result["goodput_targets_ms"]["ttft"] == 5000
    assert {path.name for path in plot.glob("*.svg")} == {
        "ttft.svg", "itl.svg", "tenants.svg", "router.svg",
    }  # fmt: skip


@pytest.mark.parametrize(("after_s", "times"), [(0.0, 1), (60.0, 0)])
def test_slow_endpoint_is_named_while_the_command_waits(
    after_s: float, times: int, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "NOTE_AFTER_S", after_s)
    with running(FakeOpenAI()) as fake:
        printed = program("bench", "--url", fake.url, *SHORT, "--num-requests", "2")
        line = f"vllm-sched bench: waiting for {fake.url}: it must list its models, "
    assert printed.err.count(line) == times


def test_sessions_are_played_and_reported(tmp_path: Path, program: Program) -> None:
    save, trace = tmp_path / "out.json", tmp_path / "talks.jsonl"
    talk = {"turns": [{"text": "a" * 40, "output_length": 3}, {"text": "b" * 40}]}
    trace.write_text(f"{json.dumps(talk)}\n" * 3)
    words = ["--workload", trace, "--concurrency", "2", "--save", save]
    with running(FakeOpenAI()) as fake:
        printed = program("bench", "--url", fake.url, *words)
    assert "tasks finished 3" in printed.words
    result = json.loads(save.read_text())
    assert (result["completed"], result["max_concurrency"]) == (6, 2)
    assert result["sessions"]["finished"] == 3
    assert sorted(result["turns_of"]) == [0, 0, 0, 1, 1, 1]


def test_failures_are_counted_printed_and_set_the_exit_code(program: Program) -> None:
    words = [*SHORT, "--request-rate", "200", "--num-requests", "6"]
    with running(FakeOpenAI(failing=(1, 3))) as fake:
        printed = program("bench", "--url", fake.url, *words, status=1).words
    assert "failed 2" in printed
    assert "2 failed: HTTP 503" in printed


def test_trace_is_played_at_its_own_times(tmp_path: Path, program: Program) -> None:
    trace, save = tmp_path / "t.jsonl", tmp_path / "out.json"
    line = {"input_length": 30, "output_length": 2}
    trace.write_text("".join(json.dumps(line | {"timestamp": 10 * i}) + "\n" for i in range(9)))
    with running(FakeOpenAI()) as fake:
        words = ["--workload", trace, "--trace", "--save", save]
        printed = program("bench", "--url", fake.url, *words)
    assert printed.err.splitlines()[0].endswith(", requests: 9 in 0.08 s")
    result = json.loads(save.read_text())
    assert result["start_times"] == pytest.approx([0.01 * i for i in range(9)])
    assert result["workload"] == {
        "name": "t", "seed": 0, "scale": 1.0, "timed": True, "tenants": 0,
    }  # fmt: skip


def test_run_without_a_request_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    with running(FakeOpenAI()) as fake:
        bench = ["bench", "--url", fake.url]
        words = [*SHORT, "--concurrency", "1", "--duration", "1e-9"]
        refused = program(*bench, *words, status=2)
        assert "--duration 1e-09: ended before a request was sent" in refused.err
        # Emptied after it was read.
        monkeypatch.setattr(RequestTrace, "requests", lambda *_: iter(()))
        refused = program(*bench, "--workload", trace, status=2)
    last = refused.err.splitlines()[-1]
    assert last == "vllm-sched bench: t: no request was sent, because none is left"
    assert "requests done" not in refused.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workload quake", "unknown workload 'quake'; use one of: azure-conv"),
        ("--workload no/such.jsonl", "No such file"),
        ("--trace", "azure-conv has no times of its own"),
        ("--goodput speed:3", "unknown target"),
        ("--request-rate -1", "--request-rate -1"),
        ("--timeout 0", "--timeout 0"),
        ("--save /no/such/folder/a.json", "there is no folder /no/such/folder"),
        (f"--plot {__file__}", "is a file"),
        ("", "http://127.0.0.1:9: connection refused"),
    ],
)
def test_invalid_option_is_refused(words: str, message: str, program: Program) -> None:
    assert message in program.refusal("bench", "--url", "http://127.0.0.1:9", *words.split())


def test_doubtful_figures_are_reported_and_saved(program: Program, tmp_path: Path) -> None:
    save, few = tmp_path / "out.json", ["--num-requests", "2"]
    with running(FakeOpenAI(tokenizer=False, tells_usage=False, knows_ignore_eos=False)) as fake:
        url = ["--url", fake.url, *SHORT]
        bench = program("bench", *url, "--request-rate", "200", *few, "--save", save).words
        sweep = program("sweep", *url, "--request-rates", "200", *few, "--seeds", "1").words
    for doubt in (NO_IGNORE_EOS, NO_COUNT, "2 responses had no usage"):
        assert doubt in bench
        assert doubt in sweep
        assert any(each.startswith(doubt) for each in json.loads(save.read_text())["warnings"])


def test_api_key_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    words = [*SHORT, "--request-rate", "100", "--num-requests", "2"]
    with running(FakeOpenAI(key="k-123")) as fake:
        assert "401" in program.refusal("bench", "--url", fake.url, *words)
        monkeypatch.setenv("OPENAI_API_KEY", "k-123\r")  # as from a file with CRLF
        assert "k-123" not in "".join(program("bench", "--url", fake.url, *words))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_bench_saves_partial_results(number: int, tmp_path: Path) -> None:
    save = tmp_path / "out.json"
    words = ["bench", *SHORT, "--request-rate", "50", "--duration", "600", "--save", save]
    with running(FakeOpenAI(itl_s=0.001)) as fake:
        out, err = run_until_stopped(fake, number, lambda: len(fake.played) >= 20, *words)
    assert "interrupted: partial results" in out
    assert "requests done" in out
    began, *_, ended = err.splitlines()
    assert began.startswith("vllm-sched bench: 20x3 against ")
    assert re.fullmatch(r"vllm-sched bench: \d+ s, \d+ done, \d+ in flight", ended)
    kept = json.loads(save.read_text())
    assert kept["completed"] + kept["interrupted"] >= 5  # the last one may be in flight


@pytest.mark.parametrize(
    ("command", "number"), [("bench", signal.SIGTERM), ("sweep", signal.SIGINT)]
)
def test_interrupt_does_not_wait_for_a_silent_endpoint(
    number: int, command: str, tmp_path: Path
) -> None:
    words = [command, *SHORT, "--save", tmp_path / "out.json"]
    with running(FakeOpenAI(ttft_s=600)) as fake:
        out, err = run_until_stopped(fake, number, lambda: fake.bodies, *words)
    assert (out, err) == ("", f"vllm-sched {command}: interrupted\n")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("command", ["bench", "sweep"])
def test_interrupt_before_the_first_result_keeps_the_older_file(
    command: str, tmp_path: Path
) -> None:
    save, plot = tmp_path / "out.json", tmp_path / "pictures"
    save.write_text("older")
    words = [command, *SHORT, "--save", save, "--plot", plot]
    with running(FakeOpenAI(hangs=True)) as fake:
        out, err = run_until_stopped(fake, signal.SIGINT, lambda: fake.played, *words)
    assert "partial results" not in out
    assert err.splitlines()[-1] == f"vllm-sched {command}: interrupted"
    assert save.read_text() == "older"
    assert not plot.exists()


def test_progress_is_printed_as_lines_without_a_terminal(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.3)
    words = [*SHORT, "--request-rate", "20", "--duration", "1.1"]
    with running(FakeOpenAI()) as fake:
        printed = program("bench", "--url", fake.url, *words)
    began, *progress, _ended = printed.err.splitlines()
    assert began.startswith("vllm-sched bench: 20x3 against fake at http://")
    assert 1 <= len(progress) <= 3
    for line in progress:
        assert re.fullmatch(r"vllm-sched bench: \d s, \d+ done, \d+ in flight", line)
    assert "against" not in printed.out
    assert "in flight" not in printed.out

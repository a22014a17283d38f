"""`vllm-sched sweep` against a fake endpoint."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_openai import FakeOpenAI
from tests.cli.bench.endpoint import run_until_stopped, running
from tests.cli.program import Program

Swept = Callable[..., dict[str, Any]]
SHORT = ["--workload", "20x1", "--seeds", "1"]


@pytest.fixture
def swept(program: Program, tmp_path: Path) -> Swept:
    """Return a function that runs `sweep` against an endpoint and returns the saved result."""

    def run(fake: FakeOpenAI, *words: object) -> dict[str, Any]:
        save = tmp_path / "sweep.json"
        with running(fake):
            program("sweep", "--url", fake.url, *words, "--save", save)
        result: dict[str, Any] = json.loads(save.read_text())
        return result

    return run


@pytest.mark.usefixtures("svg_only")
def test_listed_loads_of_two_workloads_are_measured(tmp_path: Path, program: Program) -> None:
    save, plot = tmp_path / "sweep.json", tmp_path / "pictures"
    words = [
        "--workload", "20x3", "--workload", "200x3", "--request-rates", "40,20",
        "--concurrencies", "1,2", "--seeds", "2", "--duration", "0.3",
        "--goodput", "ttft:5000", "--save", save, "--plot", plot,
    ]  # fmt: skip
    with running(FakeOpenAI()) as fake:
        printed = program("sweep", "--url", fake.url, *words)
    for word in ("200x3", "40/s", "2 at once", "in time"):
        assert word in printed.out
    assert "vllm-sched sweep: 20x3 at 20 requests/s, seed 0\n" in printed.err
    assert not re.search(r"seed \d+$", printed.out, re.MULTILINE)
    result = json.loads(save.read_text())
    assert len(result["points"]) == 2 * (2 + 2) * 2
    assert result["served_request_rate"] == {"20x3": 40, "200x3": 40}
    assert {path.stem for path in plot.iterdir()} == {"goodput", "ttft-by-rate", "throughput"}
    prompts = [body["prompt"] for body in fake.played]
    # No run finds prompts of another run in a prefix cache.
    assert len({prompt[:40] for prompt in prompts}) == len(prompts)


def test_search_stops_when_requests_are_late(swept: Swept) -> None:
    # 2 slots of 50 ms each: 40 requests/s, and then a queue.
    words = [*SHORT, "--start", "10", "--duration", "1", "--goodput", "ttft:200"]
    result = swept(FakeOpenAI(ttft_s=0.05, slots=2), *words)
    served_rate = result["served_request_rate"]["20x1"]
    assert served_rate is not None
    assert 5 <= served_rate <= 60
    assert max(point["request_rate"] for point in result["points"]) > served_rate


def test_downward_search_ends_when_no_request_would_arrive(swept: Swept) -> None:
    words = [*SHORT, "--start", "4", "--duration", "0.5", "--goodput", "ttft:10"]
    result = swept(FakeOpenAI(ttft_s=0.05), *words)
    assert [point["request_rate"] for point in result["points"]] == [4, 2]
    assert result["served_request_rate"] == {"20x1": None}


def test_short_trace_is_repeated_for_the_whole_duration(swept: Swept, tmp_path: Path) -> None:
    path = tmp_path / "sixty.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 40, "output_length": 2}\n' * 6)
    # 2 slots of 25 ms each serve six requests in time, but not 200 per second.
    words = ["--workload", path, "--request-rates", "200", "--seeds", "1"]
    words += ["--duration", "1", "--goodput", "ttft:500"]
    result = swept(FakeOpenAI(ttft_s=0.025, slots=2), *words)
    assert result["points"][0]["completed"] + result["points"][0]["failed"] == 200
    assert result["served_request_rate"] == {"sixty": None}


def test_slow_answers_without_targets_are_no_queue(swept: Swept) -> None:
    # A stalled machine delays the later answers, so the run is repeated.
    for _ in range(3):
        # Each answer takes 0.6 s, so the last ends long after the last request.
        words = [*SHORT, "--request-rates", "20", "--duration", "1"]
        result = swept(FakeOpenAI(ttft_s=0.6), *words)
        assert result["points"][0]["request_throughput"] < 0.9 * 20
        if result["served_request_rate"]["20x1"] is not None:
            break
    assert result["served_request_rate"] == {"20x1": 20}


def test_sweep_with_only_failures_exits_with_1(program: Program) -> None:
    words = ["--workload", "20x3", "--seeds", "1", "--request-rates", "20", "--duration", "0.2"]
    with running(FakeOpenAI(failing=tuple(range(100)))) as fake:
        out = program("sweep", "--url", fake.url, *words, status=1).out
    assert "no rate was kept up with" in out
    assert "nan" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_sweep_saves_the_measured_loads(number: int, tmp_path: Path) -> None:
    save = tmp_path / "sweep.json"
    words = ["sweep", "--workload", "20x2", "--seeds", "1", "--request-rates", "20,30"]
    words += ["--duration", "1", "--save", save]
    with running(FakeOpenAI()) as fake:
        # The first load has 20 requests, so one more belongs to the second.
        out, err = run_until_stopped(fake, number, lambda: len(fake.played) > 20, *words)
    assert "at 30 requests/s" in err
    assert "interrupted: partial results" in out
    assert "Traceback" not in err
    assert [each["request_rate"] for each in json.loads(save.read_text())["points"]] == [20]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--request-rates 1,two", "--request-rates 1,two: 'two' is not a load"),
        ("--concurrencies 1.5", "'1.5' is not a load; give whole numbers"),
        ("--request-rates 0", "'0' is not a load"),
        (f"--concurrencies 1{400 * '0'}", "is not a load; give whole numbers"),
        ("--concurrencies 1,99999999", "--concurrency: must be at most 10,000,000"),
        ("--seeds 0", "--seeds 0"),
        ("--start 0", "--start 0"),
        ("--start inf", "--start inf"),
        ("--request-rates 0.001,1", "at 0.001 requests/s no request arrives"),
        ("--request-rates 1,1e6", "60,000,000 requests: a run has at most 10,000,000"),
        ("--workload quake", "unknown workload 'quake'"),
        ("--workload 9x9 --workload 9x9", "there is already a workload 9x9"),
        ("", "connection refused"),
    ],
)
def test_invalid_option_is_refused(words: str, message: str, program: Program) -> None:
    assert message in program.refusal("sweep", "--url", "http://127.0.0.1:9", *words.split())

"""`vllm-sched sweep` against a fake endpoint."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.bench.fake_openai import FakeOpenAI
from tests.cli.bench.test_bench import run_until_stopped, running
from vllm_sched.cli.main import main


@pytest.mark.usefixtures("svg_only")
def test_listed_loads_of_two_workloads_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, plot = tmp_path / "sweep.json", tmp_path / "pictures"
    with running(FakeOpenAI()) as fake:
        words = [
            "--workload", "20x3", "--workload", "200x3", "--request-rates", "40,20",
            "--concurrencies", "1,2", "--seeds", "2", "--duration", "0.3",
            "--goodput", "ttft:5000", "--save", str(save), "--plot", str(plot),
        ]  # fmt: skip
        assert main(["sweep", "--url", fake.url, *words]) == 0
    printed = capsys.readouterr()
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


def test_search_stops_when_requests_are_late(tmp_path: Path) -> None:
    save = tmp_path / "sweep.json"
    # 2 slots of 50 ms each: 40 requests/s, and then a queue.
    with running(FakeOpenAI(ttft_s=0.05, slots=2)) as fake:
        words = ["--workload", "20x1", "--start", "10", "--seeds", "1", "--duration", "1"]
        words += ["--goodput", "ttft:200", "--save", str(save)]
        assert main(["sweep", "--url", fake.url, *words]) == 0
    result = json.loads(save.read_text())
    rates = [point["request_rate"] for point in result["points"]]
    served_rate = result["served_request_rate"]["20x1"]
    assert served_rate is not None
    assert 5 <= served_rate <= 60
    assert max(rates) > served_rate


def test_downward_search_ends_when_no_request_would_arrive(tmp_path: Path) -> None:
    save = tmp_path / "sweep.json"
    with running(FakeOpenAI(ttft_s=0.05)) as fake:
        words = ["--workload", "20x1", "--start", "4", "--seeds", "1", "--duration", "0.5"]
        words += ["--goodput", "ttft:10", "--save", str(save)]
        assert main(["sweep", "--url", fake.url, *words]) == 0
    result = json.loads(save.read_text())
    assert [point["request_rate"] for point in result["points"]] == [4, 2]
    assert result["served_request_rate"] == {"20x1": None}


def test_short_trace_is_repeated_for_the_whole_duration(tmp_path: Path) -> None:
    path, save = tmp_path / "sixty.jsonl", tmp_path / "sweep.json"
    path.write_text('{"timestamp": 0, "input_length": 40, "output_length": 2}\n' * 6)
    # 2 slots of 25 ms each serve six requests in time, but not 200 per second.
    with running(FakeOpenAI(ttft_s=0.025, slots=2)) as fake:
        words = ["--workload", str(path), "--request-rates", "200", "--seeds", "1"]
        words += ["--duration", "1", "--goodput", "ttft:500", "--save", str(save)]
        assert main(["sweep", "--url", fake.url, *words]) == 0
    result = json.loads(save.read_text())
    assert result["points"][0]["completed"] + result["points"][0]["failed"] == 200
    assert result["served_request_rate"] == {"sixty": None}


def test_slow_answers_without_targets_are_no_queue(tmp_path: Path) -> None:
    save = tmp_path / "sweep.json"
    words = ["--workload", "20x1", "--request-rates", "20", "--seeds", "1", "--duration", "1"]
    # A stalled machine delays the later answers, so the run is repeated.
    for _ in range(3):
        # Each answer takes 0.6 s, so the last ends long after the last request.
        with running(FakeOpenAI(ttft_s=0.6)) as fake:
            assert main(["sweep", "--url", fake.url, *words, "--save", str(save)]) == 0
        result = json.loads(save.read_text())
        assert result["points"][0]["request_throughput"] < 0.9 * 20
        if result["served_request_rate"]["20x1"] is not None:
            break
    assert result["served_request_rate"] == {"20x1": 20}


def test_sweep_with_only_failures_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeOpenAI(failing=tuple(range(100)))) as fake:
        words = ["--workload", "20x3", "--request-rates", "20", "--seeds", "1", "--duration", "0.2"]
        assert main(["sweep", "--url", fake.url, *words]) == 1
    out = capsys.readouterr().out
    assert "no rate was kept up with" in out
    assert "nan" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_sweep_saves_the_measured_loads(number: int, tmp_path: Path) -> None:
    save = tmp_path / "sweep.json"
    words = ["--workload", "20x2", "--request-rates", "20,30", "--seeds", "1", "--duration", "1"]
    words += ["--save", str(save)]
    with running(FakeOpenAI()) as fake:
        # The first load has 20 requests, so one more belongs to the second.
        status, out, err = run_until_stopped(
            "sweep", fake, words, number, lambda: len(fake.played) > 20, 30
        )
    assert status == 130
    assert "at 30 requests/s" in err
    assert "interrupted: partial results" in out
    assert "Traceback" not in err
    assert [each["request_rate"] for each in json.loads(save.read_text())["points"]] == [20]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rates", "1,two"], "--request-rates 1,two: 'two' is not a load"),
        (["--concurrencies", "1.5"], "'1.5' is not a load; give whole numbers"),
        (["--request-rates", "0"], "'0' is not a load"),
        (["--concurrencies", "1" + 400 * "0"], "is not a load; give whole numbers"),
        (["--concurrencies", "1,99999999"], "--concurrency: must be at most 10,000,000"),
        (["--seeds", "0"], "--seeds 0"),
        (["--start", "0"], "--start 0"),
        (["--start", "inf"], "--start inf"),
        (["--request-rates", "0.001,1"], "at 0.001 requests/s no request arrives"),
        (["--request-rates", "1,1e6"], "60,000,000 requests: a run has at most 10,000,000"),
        (["--workload", "quake"], "unknown workload 'quake'"),
        (["--workload", "9x9", "--workload", "9x9"], "there is already a workload 9x9"),
        ([], "connection refused"),
    ],
)
def test_invalid_option_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--url", "http://127.0.0.1:9", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1

"""`vllm-sched bench` against a fake endpoint."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.fake_openai import FakeOpenAI, serving
from vllm_sched.bench.client.endpoint import NO_COUNT, NO_IGNORE_EOS
from vllm_sched.bench.traffic.traces import RequestTrace
from vllm_sched.cli import progress_bar
from vllm_sched.cli.main import main


@contextmanager
def running(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Serve in another thread, because the command blocks this one."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with serving(fake):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


@pytest.mark.usefixtures("svg_only")
def test_run_prints_figures_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, plot = tmp_path / "out.json", tmp_path / "pictures"
    with running(FakeOpenAI(workers=("s0", "l0"))) as fake:
        words = [
            "--workload", "azure-conv:1,azure-code:1", "--request-rate", "100", "--num-requests",
            "40", "--scale", "0.05", "--tenants", "3", "--goodput", "ttft:5000", "itl:5000",
            "--save", str(save), "--plot", str(plot), "--seed", "4",
        ]  # fmt: skip
        assert main(["bench", "--url", fake.url, *words]) == 0
    out = capsys.readouterr().out
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


def test_sessions_are_played_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, trace = tmp_path / "out.json", tmp_path / "talks.jsonl"
    talk = {"turns": [{"text": "a" * 40, "output_length": 3}, {"text": "b" * 40}]}
    trace.write_text(f"{json.dumps(talk)}\n" * 3)
    with running(FakeOpenAI()) as fake:
        words = ["--workload", str(trace), "--concurrency", "2", "--save", str(save)]
        assert main(["bench", "--url", fake.url, *words]) == 0
    assert "tasks finished 3" in " ".join(capsys.readouterr().out.split())
    result = json.loads(save.read_text())
    assert (result["completed"], result["max_concurrency"]) == (6, 2)
    assert result["sessions"]["finished"] == 3
    assert sorted(result["turns_of"]) == [0, 0, 0, 1, 1, 1]


def test_failures_are_counted_printed_and_set_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running(FakeOpenAI(failing=(1, 3))) as fake:
        words = ["--workload", "20x3", "--request-rate", "200", "--num-requests", "6"]
        assert main(["bench", "--url", fake.url, *words]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "failed 2" in out
    assert "2 failed: HTTP 503" in out


def test_trace_is_played_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = {"input_length": 30, "output_length": 2}
    trace.write_text("".join(json.dumps(line | {"timestamp": 10 * i}) + "\n" for i in range(9)))
    save = tmp_path / "out.json"
    with running(FakeOpenAI()) as fake:
        words = ["--workload", str(trace), "--trace", "--save", str(save)]
        assert main(["bench", "--url", fake.url, *words]) == 0
    result = json.loads(save.read_text())
    assert result["start_times"] == pytest.approx([0.01 * i for i in range(9)])
    assert result["workload"] == {
        "name": "t", "seed": 0, "scale": 1.0, "timed": True, "tenants": 0,
    }  # fmt: skip


def test_run_without_a_request_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    with running(FakeOpenAI()) as fake:
        bench = ["bench", "--url", fake.url]
        words = ["--workload", "20x2", "--concurrency", "1", "--duration", "1e-9"]
        assert main([*bench, *words]) == 2
        assert "--duration 1e-09: ended before a request was sent" in capsys.readouterr().err
        monkeypatch.setattr(
            RequestTrace, "requests", lambda *_: iter(())
        )  # emptied after it was read
        assert main([*bench, "--workload", str(trace)]) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last == "vllm-sched bench: t: no request was sent, because none is left"
    assert "requests done" not in printed.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "quake"], "unknown workload 'quake'; use one of: azure-conv"),
        (["--workload", "no/such.jsonl"], "No such file"),
        (["--trace"], "azure-conv has no times of its own"),
        (["--goodput", "speed:3"], "unknown target"),
        (["--request-rate", "-1"], "--request-rate -1"),
        (["--timeout", "0"], "--timeout 0"),
        (["--save", "/no/such/folder/a.json"], "there is no folder /no/such/folder"),
        (["--plot", __file__], "is a file"),
        ([], "http://127.0.0.1:9: connection refused"),
    ],
)
def test_invalid_option_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("vllm-sched bench: ")


def test_doubtful_figures_are_reported_and_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save = tmp_path / "out.json"
    words = ["--workload", "20x3", "--request-rate", "200", "--num-requests", "2"]
    with running(FakeOpenAI(tokenizer=False, tells_usage=False, knows_ignore_eos=False)) as fake:
        assert main(["bench", "--url", fake.url, *words, "--save", str(save)]) == 0
        bench_output = " ".join(capsys.readouterr().out.split())
        assert main(["sweep", "--url", fake.url, *words[:2], "--request-rates", "200",
                     "--num-requests", "2", "--seeds", "1"]) == 0  # fmt: skip
        sweep_output = " ".join(capsys.readouterr().out.split())
    for doubt in (NO_IGNORE_EOS, NO_COUNT, "2 responses had no usage"):
        assert doubt in bench_output
        assert doubt in sweep_output
        assert any(each.startswith(doubt) for each in json.loads(save.read_text())["warnings"])


def test_api_key_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workload", "20x2", "--request-rate", "100", "--num-requests", "2"]
    with running(FakeOpenAI(key="k-123")) as fake:
        assert main(["bench", "--url", fake.url, *words]) == 2
        assert "401" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "k-123\r")  # as from a file with CRLF
        assert main(["bench", "--url", fake.url, *words]) == 0
        assert "k-123" not in "".join(capsys.readouterr())


def run_until_stopped(
    command: str,
    fake: FakeOpenAI,
    words: list[str],
    signal_number: int,
    ready: Callable[[], object],
    within_s: float = 60,
) -> tuple[int, str, str]:
    """Run a command until `ready()`, send the signal; return its exit code and output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_sched.cli.main", command, "--url", fake.url, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        waited = threading.Event()
        for _ in range(600):
            if ready():
                break
            waited.wait(0.05)
        assert ready()
        process.send_signal(signal_number)
        out, err = process.communicate(timeout=within_s)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_bench_saves_partial_results(number: int, tmp_path: Path) -> None:
    save = tmp_path / "out.json"
    with running(FakeOpenAI(itl_s=0.001)) as fake:
        words = ["--workload", "20x3", "--request-rate", "50", "--duration", "600"]
        words += ["--save", str(save)]
        status, out, err = run_until_stopped(
            "bench", fake, words, number, lambda: len(fake.played) >= 5, 30
        )
    assert status == 130
    assert "interrupted: partial results" in out
    assert "requests done" in out
    began, *_, ended = err.splitlines()
    assert began.startswith("vllm-sched bench: 20x3 against ")
    assert re.fullmatch(r"vllm-sched bench: \d+ s, \d+ done, \d+ in flight", ended)
    kept = json.loads(save.read_text())
    assert kept["completed"] + kept["interrupted"] >= 5  # the last one may be in flight


@pytest.mark.parametrize("command", ["bench", "sweep"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_does_not_wait_for_a_silent_endpoint(
    number: int, command: str, tmp_path: Path
) -> None:
    words = ["--workload", "20x3", "--save", str(tmp_path / "out.json")]
    with running(FakeOpenAI(ttft_s=600)) as fake:
        status, out, err = run_until_stopped(command, fake, words, number, lambda: fake.bodies)
    assert (status, out) == (130, "")
    assert err == f"vllm-sched {command}: interrupted\n"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("command", ["bench", "sweep"])
def test_interrupt_before_the_first_result_keeps_the_older_file(
    command: str, tmp_path: Path
) -> None:
    save, plot = tmp_path / "out.json", tmp_path / "pictures"
    save.write_text("older")
    words = ["--workload", "20x3", "--save", str(save), "--plot", str(plot)]
    with running(FakeOpenAI(hangs=True)) as fake:
        status, out, err = run_until_stopped(
            command, fake, words, signal.SIGINT, lambda: fake.played
        )
    assert status == 130
    assert "partial results" not in out
    assert err.splitlines()[-1] == f"vllm-sched {command}: interrupted"
    assert save.read_text() == "older"
    assert not plot.exists()


def test_progress_is_printed_as_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.6)
    words = ["--workload", "20x3", "--request-rate", "20", "--duration", "2.2"]
    with running(FakeOpenAI()) as fake:
        assert main(["bench", "--url", fake.url, *words]) == 0
    printed = capsys.readouterr()
    began, *progress, _ended = printed.err.splitlines()
    assert began.startswith("vllm-sched bench: 20x3 against fake at http://")
    assert 1 <= len(progress) <= 3
    for line in progress:
        assert re.fullmatch(r"vllm-sched bench: \d s, \d+ done, \d+ in flight", line)
    assert "against" not in printed.out
    assert "in flight" not in printed.out

"""The engine trace of a benchmark run."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.bench.results import engine_trace
from vllm_sched.bench.results.engine_trace import Phase, fetch, path_of, read, with_tracing
from vllm_sched.engine.trace import TracedArrival, TracedStep, chrome_trace
from vllm_sched.workers.launch import Side, WorkerError

NAME = "cmpl-round1-3-0-1a2b3c4d"
LOG = [
    TracedArrival(1.0, NAME, 100),
    TracedArrival(1.0, "cmpl-round1-30-0-1a2b3c4d", 5),
    TracedArrival(1.0, "cmpl-other", 5),
    TracedStep(1, 2.0, 3.0, 64, {NAME: 64}, {NAME: 0}, 1, 0),
    TracedStep(2, 3.0, 3.5, 64, {NAME: 36, "cmpl-other": 5}, {NAME: 64}, 2, 0),
    TracedStep(3, 3.5, 3.75, 64, {NAME: 1}, {}, 1, 0),
]


def test_phases_are_found_by_the_request_name(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text("".join(chrome_trace(LOG, 4.0)))
    stories = read(file)
    assert set(stories) == {"round1-3", "round1-30"}
    assert stories["round1-3"] == [
        Phase("waiting", 1.0, 2.0),
        Phase("prefill", 2.0, 3.0, 64),
        Phase("prefill", 3.0, 3.5, 36),
        Phase("decode", 3.5, 3.75, 1),
    ]


def test_default_side_is_traced_as_policy_scheduler_without_policies() -> None:
    assert with_tracing(Side("default", {}, ("--x",))) == Side("none", {}, ("--x",))
    with_policy = Side("long_prompt", {"long_prompt": {}})
    assert with_tracing(with_policy) is with_policy


def test_trace_path_has_the_side_in_its_name() -> None:
    assert path_of(Path("a/out.json"), "baseline") == Path("a/out.baseline.json")
    assert path_of(Path("out"), "candidate") == Path("out.candidate.json")


class SignalledWorker:
    """A worker that is this process; it may die at its second check."""

    name = "signalled"

    def __init__(self, *, dies: bool) -> None:
        self.pid = os.getpid()  # of the test's process, which may be a fork
        self.checks = 0
        self.dies = dies

    def check(self) -> None:
        self.checks += 1
        if self.dies and self.checks > 1:
            raise WorkerError("it died")


@pytest.fixture
def signalled() -> Any:
    """Return an event that the worker's signal sets."""
    received = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: received.set())
    yield received
    signal.signal(signal.SIGUSR1, before)


def test_fetch_signals_the_worker_and_ignores_an_old_file(
    tmp_path: Path, signalled: threading.Event
) -> None:
    file = tmp_path / "t.json"
    file.write_text("from before")

    def write() -> None:
        signalled.wait(30)
        (tmp_path / "part").write_text("".join(chrome_trace(LOG, 4.0)))
        (tmp_path / "part").replace(file)

    writer = threading.Thread(target=write)
    writer.start()
    worker: Any = SignalledWorker(dies=False)
    assert "round1-3" in fetch(worker, file)
    writer.join()


@pytest.mark.usefixtures("signalled")
def test_worker_without_a_trace_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_trace, "WRITE_TIMEOUT_S", -1.0)
    silent: Any = SignalledWorker(dies=False)
    with pytest.raises(WorkerError, match="wrote no trace"):
        fetch(silent, tmp_path / "t.json")


@pytest.mark.usefixtures("signalled")
def test_worker_that_dies_during_fetch_is_an_error(tmp_path: Path) -> None:
    dying: Any = SignalledWorker(dies=True)
    with pytest.raises(WorkerError, match="it died"):
        fetch(dying, tmp_path / "t.json")

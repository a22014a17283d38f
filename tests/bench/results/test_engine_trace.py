"""The engine's own account, read beside the client's."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.bench.results import engine_trace
from vllm_sched.bench.results.engine_trace import Phase, fetch, path_of, read, traceable
from vllm_sched.engine.trace import QueuedRequest, StepNote, chrome
from vllm_sched.workers.launch import Side, WorkerError

NAME = "cmpl-round1-3-0-1a2b3c4d"
LOG = [
    QueuedRequest(1.0, NAME, 100),
    QueuedRequest(1.0, "cmpl-round1-30-0-1a2b3c4d", 5),
    QueuedRequest(1.0, "cmpl-of-somebody-else", 5),
    StepNote(1, 2.0, 3.0, 64, {NAME: 64}, {NAME: 0}, 1, 0),
    StepNote(2, 3.0, 3.5, 64, {NAME: 36, "cmpl-of-somebody-else": 5}, {NAME: 64}, 2, 0),
    StepNote(3, 3.5, 3.75, 64, {NAME: 1}, {}, 1, 0),
]


def test_phases_are_found_by_the_clients_name(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text("".join(chrome(LOG, 4.0)))
    stories = read(file)
    assert set(stories) == {"round1-3", "round1-30"}
    assert stories["round1-3"] == [
        Phase("waiting", 1.0, 2.0),
        Phase("prefill", 2.0, 3.0, 64),
        Phase("prefill", 3.0, 3.5, 36),
        Phase("decode", 3.5, 3.75, 1),
    ]


def test_a_side_of_vllms_own_is_watched_as_ours_without_a_policy() -> None:
    assert traceable(Side("default", {}, ("--x",))) == Side("none", {}, ("--x",))
    ours = Side("long_prompt", {"long_prompt": {}})
    assert traceable(ours) is ours


def test_a_file_per_side() -> None:
    assert path_of(Path("a/out.json"), "baseline") == Path("a/out.baseline.json")
    assert path_of(Path("out"), "candidate") == Path("out.candidate.json")


class Asked:
    """Stands for a worker that is this process, and dies on its second look."""

    name = "asked"

    def __init__(self, *, dies: bool) -> None:
        self.pid = os.getpid()  # of the process that runs the test, which may be a fork
        self.looks = 0
        self.dies = dies

    def check(self) -> None:
        self.looks += 1
        if self.dies and self.looks > 1:
            raise WorkerError("it died")


@pytest.fixture
def signalled() -> Any:
    """Hear the signal that the worker would."""
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    yield heard
    signal.signal(signal.SIGUSR1, before)


def test_a_worker_is_asked_and_an_old_file_is_not_taken(
    tmp_path: Path, signalled: threading.Event
) -> None:
    file = tmp_path / "t.json"
    file.write_text("from before")

    def write() -> None:
        signalled.wait(30)
        (tmp_path / "part").write_text("".join(chrome(LOG, 4.0)))
        (tmp_path / "part").replace(file)

    writer = threading.Thread(target=write)
    writer.start()
    worker: Any = Asked(dies=False)
    assert "round1-3" in fetch(worker, file)
    writer.join()


@pytest.mark.usefixtures("signalled")
def test_a_worker_that_writes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_trace, "WRITE_TIMEOUT_S", -1.0)
    silent: Any = Asked(dies=False)
    with pytest.raises(WorkerError, match="wrote no trace"):
        fetch(silent, tmp_path / "t.json")


@pytest.mark.usefixtures("signalled")
def test_one_that_dies_meanwhile_says_so(tmp_path: Path) -> None:
    dying: Any = Asked(dies=True)
    with pytest.raises(WorkerError, match="it died"):
        fetch(dying, tmp_path / "t.json")

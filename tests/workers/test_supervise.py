"""Supervision of workers: the rules on a fake clock, the threads with cheap servers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.servers import alive, assert_gone, family, members, script
from vllm_sched.workers.launch import Worker, WorkerError, free_port
from vllm_sched.workers.supervise import KeeperEvent, KeeperState, Supervisor, WorkerKeeper

LOAD_S = 20.0


class FakeClock:
    """A clock that advances with each wait, and ends the run at a given time."""

    def __init__(self, end: float) -> None:
        self.now = 0.0
        self.end = end

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.now >= self.end


class MortalWorker:
    """A worker with given lifetimes; None: unlimited."""

    def __init__(
        self, world: FakeClock, lives: list[float | None], *, silent_after: float = float("inf")
    ) -> None:
        self.name = "w"
        self.world = world
        self.lives = iter(lives)
        self.silent_after = silent_after
        self.calls: list[str] = []
        self.dies_at = 0.0

    def start(self) -> None:
        self.calls.append("start")
        life = next(self.lives)
        if life == -1:
            raise FileNotFoundError("no such program")
        self.dies_at = float("inf") if life is None else self.world.now + life

    def wait_ready(self, pause: Callable[[float], object]) -> None:
        ready_at = self.world.now + LOAD_S
        while self.world.now < ready_at:
            self.check()
            pause(0.5)

    def check(self) -> None:
        if self.world.now >= self.dies_at:
            raise WorkerError("w died with exit code 1; the end of its log:\nboom")

    def is_healthy(self) -> bool:
        return self.world.now < self.silent_after

    def stop(self) -> None:
        self.calls.append("stop")


def kept(worker: MortalWorker) -> list[KeeperEvent]:
    """Keep a worker until its clock ends; return the events."""
    events: list[KeeperEvent] = []
    world = worker.world
    WorkerKeeper(worker, events.append, wait=world.wait, clock=lambda: world.now).run()
    return events


def deaths(events: list[KeeperEvent]) -> list[KeeperEvent]:
    return [event for event in events if event.state is KeeperState.DIED]


def test_live_worker_is_started_once_and_stopped_at_the_end() -> None:
    worker = MortalWorker(FakeClock(1000), [None])
    events = kept(worker)
    assert [event.state for event in events] == ["queued", "starting", "ready", "stopped"]
    assert events[2].seconds == pytest.approx(LOAD_S)
    assert worker.calls == ["start", "stop"]


def test_dead_worker_is_stopped_and_restarted() -> None:
    worker = MortalWorker(FakeClock(1000), [100, None])
    events = kept(worker)
    (death,) = deaths(events)
    assert death.seconds == pytest.approx(100, abs=2)
    assert death.error.endswith("boom")
    assert (death.deaths, death.again_s) == (1, 1)
    assert events[-2].state is KeeperState.READY
    assert worker.calls == ["start", "stop", "start", "stop"]


def test_restart_pauses_double_up_to_a_limit_and_may_last_for_hours() -> None:
    events = deaths(kept(MortalWorker(FakeClock(60_000), [5.0] * 3000)))
    assert [event.again_s for event in events[:7]] == [1, 2, 4, 8, 16, 30, 30]
    assert [event.deaths for event in events[:7]] == [1, 2, 3, 4, 5, 6, 7]
    assert len(events) > 1500
    assert events[-1].again_s == 30


@pytest.mark.parametrize(("ready_for", "expected"), [(50, [1, 2, 4, 8]), (70, [1, 1, 1, 1])])
def test_a_minute_of_health_resets_the_pauses(ready_for: float, expected: list[float]) -> None:
    events = deaths(kept(MortalWorker(FakeClock(5000), [LOAD_S + ready_for] * 5 + [None])))
    assert [event.again_s for event in events[:4]] == expected


def test_missing_program_counts_as_a_death() -> None:
    events = deaths(kept(MortalWorker(FakeClock(100), [-1, None])))
    assert [event.error for event in events] == ["no such program"]


def test_hanging_worker_is_restarted() -> None:
    worker = MortalWorker(FakeClock(220), [None, None], silent_after=100)
    (death,) = deaths(kept(worker))
    assert death.error == "w has not answered /health for 60 s"
    assert 150 <= death.seconds <= 175


@pytest.mark.parametrize("end", [0.0, 5.0, 60.0, 105.5])
def test_keeper_stops_in_every_phase(end: float) -> None:
    """Before the start, while it loads, while it serves, and in the pause after a death."""
    worker = MortalWorker(FakeClock(end), [105, None])
    events = kept(worker)
    assert events[-1].state is KeeperState.STOPPED
    assert worker.calls[-1] == "stop"
    assert worker.calls.count("start") <= 1


class EventLog:
    """Collects events from several threads; a test can wait for an event."""

    def __init__(self) -> None:
        self.events: list[KeeperEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: KeeperEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def states(self, worker: str) -> list[KeeperState]:
        return [event.state for event in self.events if event.worker == worker]

    def until(self, state: KeeperState, worker: str, times: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.states(worker).count(state) >= times, 60)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Worker]]:
    workers = [family(tmp_path / name) for name in ("a", "b")]
    for worker, name in zip(workers, ("a", "b"), strict=True):
        worker.name = name
    yield workers
    for worker in workers:
        worker.stop()


def test_killed_server_is_restarted_and_the_other_stays(pair: list[Worker], tmp_path: Path) -> None:
    Supervisor(pair, EventLog()).stop()  # a stop before the start does nothing
    diary = EventLog()
    with Supervisor(pair, diary):
        for name in ("a", "b"):
            diary.until(KeeperState.READY, name)
        first, other = members(tmp_path / "a"), members(tmp_path / "b")
        os.kill(first[0], signal.SIGKILL)
        diary.until(KeeperState.READY, "a", times=2)
        assert_gone(first)
        assert pair[0].is_healthy()
        assert all(alive(pid) for pid in other)
    assert diary.states("a")[-1] is diary.states("b")[-1] is KeeperState.STOPPED
    assert_gone(other)
    (death,) = deaths(diary.events)
    assert death.worker == "a"
    assert "exit code -9" in death.error


def test_supervisor_stops_while_workers_load(tmp_path: Path) -> None:
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))"
    worker = Worker(script(f"{code}; time.sleep(600)", str(tmp_path / "pid")), port=free_port())
    diary = EventLog()
    with Supervisor([worker], diary):
        pids = members(tmp_path / "pid")
    assert_gone(pids)
    assert diary.states("worker") == ["queued", "starting", "stopped"]


class LoadingWorker:
    """A worker that loads until the test ends it, and records the loading workers."""

    loading: set[str]

    def __init__(self, name: str, loading: set[str]) -> None:
        self.name = name
        self.loading = loading
        self.go = threading.Event()

    def start(self) -> None:
        self.loading.add(self.name)

    def wait_ready(self, pause: Callable[[float], object]) -> None:
        while not self.go.is_set():
            pause(0.01)
        self.loading.discard(self.name)

    def check(self) -> None:
        """Succeed, as for a live worker."""

    def is_healthy(self) -> bool:
        return True

    def stop(self) -> None:
        self.loading.discard(self.name)


def test_workers_on_one_device_load_sequentially() -> None:
    loading: set[str] = set()
    workers = [LoadingWorker(name, loading) for name in ("a", "b", "c")]
    diary = EventLog()
    with Supervisor(workers, diary, devices=["0", "0", "1"]):
        diary.until(KeeperState.STARTING, "c")
        for name in ("a", "b"):
            diary.until(KeeperState.QUEUED, name)
        first = "a" if "a" in loading else "b"
        second = "b" if first == "a" else "a"
        diary.until(KeeperState.STARTING, first)
        assert diary.states(second) == ["queued"]
        workers["ab".index(first)].go.set()
        diary.until(KeeperState.STARTING, second)
        assert diary.states(first)[-1] is KeeperState.READY

"""Keeping workers alive: the rules on a clock of our own, the threads on cheap real servers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.servers import alive, assert_gone, family, members, script
from vllm_sched.workers.launch import Worker, WorkerError, free_port
from vllm_sched.workers.supervise import KeeperNews, KeeperState, Supervisor, WorkerKeeper

LOAD_S = 20.0


class World:
    """A clock that moves when somebody waits, and ends the test's run at a given time."""

    def __init__(self, end: float) -> None:
        self.now = 0.0
        self.end = end

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.now >= self.end


class Mortal:
    """A worker whose lives last as long as the test says; None: for ever."""

    def __init__(
        self, world: World, lives: list[float | None], *, silent_after: float = float("inf")
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

    def healthy(self) -> bool:
        return self.world.now < self.silent_after

    def stop(self) -> None:
        self.calls.append("stop")


def kept(worker: Mortal) -> list[KeeperNews]:
    """Keep a worker until its world ends, and return what was told."""
    told: list[KeeperNews] = []
    world = worker.world
    WorkerKeeper(worker, told.append, wait=world.wait, clock=lambda: world.now).run()
    return told


def deaths(told: list[KeeperNews]) -> list[KeeperNews]:
    return [news for news in told if news.state is KeeperState.DIED]


def test_a_worker_that_lives_is_started_once_and_stopped_at_the_end() -> None:
    worker = Mortal(World(1000), [None])
    told = kept(worker)
    assert [news.state for news in told] == ["queued", "starting", "ready", "stopped"]
    assert told[2].seconds == pytest.approx(LOAD_S)
    assert worker.calls == ["start", "stop"]


def test_one_that_dies_is_cleared_away_and_started_again() -> None:
    worker = Mortal(World(1000), [100, None])
    told = kept(worker)
    (death,) = deaths(told)
    assert death.seconds == pytest.approx(100, abs=2)
    assert death.error.endswith("boom")
    assert (death.deaths, death.again_s) == (1, 1)
    assert told[-2].state is KeeperState.READY
    assert worker.calls == ["start", "stop", "start", "stop"]


def test_the_pauses_double_up_to_a_limit() -> None:
    told = deaths(kept(Mortal(World(2000), [5.0] * 1000)))
    assert [news.again_s for news in told[:7]] == [1, 2, 4, 8, 16, 30, 30]
    assert [news.deaths for news in told[:7]] == [1, 2, 3, 4, 5, 6, 7]


def test_a_crash_loop_may_last_for_weeks() -> None:
    told = deaths(kept(Mortal(World(60_000), [0.0] * 3000)))
    assert len(told) > 1500
    assert told[-1].again_s == 30


@pytest.mark.parametrize(("ready_for", "expected"), [(50, [1, 2, 4, 8]), (70, [1, 1, 1, 1])])
def test_a_minute_of_health_ends_the_row(ready_for: float, expected: list[float]) -> None:
    told = deaths(kept(Mortal(World(5000), [LOAD_S + ready_for] * 5 + [None])))
    assert [news.again_s for news in told[:4]] == expected


def test_a_program_that_is_not_there_is_a_death_too() -> None:
    told = deaths(kept(Mortal(World(100), [-1, None])))
    assert [news.error for news in told] == ["no such program"]


def test_one_that_hangs_is_started_again() -> None:
    worker = Mortal(World(220), [None, None], silent_after=100)
    (death,) = deaths(kept(worker))
    assert death.error == "w has not answered /health for 60 s"
    assert 150 <= death.seconds <= 175


@pytest.mark.parametrize("end", [0.0, 5.0, 60.0, 105.5])
def test_it_stops_wherever_it_is(end: float) -> None:
    """In turn: before the start, while it loads, while it serves, in the pause after a death."""
    worker = Mortal(World(end), [105, None])
    told = kept(worker)
    assert told[-1].state is KeeperState.STOPPED
    assert worker.calls[-1] == "stop"
    assert worker.calls.count("start") <= 1


class Diary:
    """Keeps news from several threads and lets a test wait for some."""

    def __init__(self) -> None:
        self.told: list[KeeperNews] = []
        self._changed = threading.Condition()

    def __call__(self, news: KeeperNews) -> None:
        with self._changed:
            self.told.append(news)
            self._changed.notify_all()

    def states(self, worker: str) -> list[KeeperState]:
        return [news.state for news in self.told if news.worker == worker]

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


def test_real_servers_come_up_and_nothing_is_left(pair: list[Worker], tmp_path: Path) -> None:
    diary = Diary()
    with Supervisor(pair, diary):
        for name in ("a", "b"):
            diary.until(KeeperState.READY, name)
        pids = [*members(tmp_path / "a"), *members(tmp_path / "b")]
        assert all(worker.healthy() for worker in pair)
    assert diary.states("a")[-1] is diary.states("b")[-1] is KeeperState.STOPPED
    assert_gone(pids)


def test_a_killed_server_comes_back_and_the_other_stays(pair: list[Worker], tmp_path: Path) -> None:
    diary = Diary()
    with Supervisor(pair, diary):
        for name in ("a", "b"):
            diary.until(KeeperState.READY, name)
        first, other = members(tmp_path / "a"), members(tmp_path / "b")
        os.kill(first[0], signal.SIGKILL)
        diary.until(KeeperState.READY, "a", times=2)
        assert_gone(first)
        assert pair[0].healthy()
        assert all(alive(pid) for pid in other)
    (death,) = deaths(diary.told)
    assert death.worker == "a"
    assert "exit code -9" in death.error


def test_it_stops_while_they_still_load(tmp_path: Path) -> None:
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))"
    worker = Worker(script(f"{code}; time.sleep(600)", str(tmp_path / "pid")), port=free_port())
    diary = Diary()
    with Supervisor([worker], diary):
        pids = members(tmp_path / "pid")
    assert_gone(pids)
    assert diary.states("worker") == ["queued", "starting", "stopped"]


def test_stopping_what_was_not_started_is_nothing(pair: list[Worker]) -> None:
    Supervisor(pair, Diary()).stop()


class Loading:
    """A worker that loads until the test lets it, and knows who else does."""

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
        """Do not complain: it lives."""

    def healthy(self) -> bool:
        return True

    def stop(self) -> None:
        self.loading.discard(self.name)


def test_two_on_one_device_load_one_after_the_other() -> None:
    loading: set[str] = set()
    workers = [Loading(name, loading) for name in ("a", "b", "c")]
    diary = Diary()
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

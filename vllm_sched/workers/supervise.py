"""Keep workers running: start them, report their state, and restart them when they die.

Each worker is used only by its own thread, so no locks are needed. The threads report each change
as a `KeeperEvent`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from vllm_sched.workers.launch import Worker, WorkerError

# The pause doubles with each death in a row.
FIRST_RESTART_PAUSE_S, MAX_RESTART_PAUSE_S = 1.0, 30.0
# Readiness for this time resets the death count.
STABLE_S = 60.0
CHECK_INTERVAL_S = 1.0
# A worker that fails its health checks for MAX_UNHEALTHY_S counts as dead.
HEALTH_INTERVAL_S, MAX_UNHEALTHY_S = 10.0, 60.0


class KeeperState(StrEnum):
    QUEUED = "queued"  # another worker loads on the same device
    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class KeeperEvent:
    worker: str
    state: KeeperState
    seconds: float = 0.0  # READY: how long the start took; DIED: how long the worker lived
    error: str = ""  # DIED: the cause and the last lines of the log
    deaths: int = 0  # DIED: deaths in a row
    again_s: float = 0.0  # DIED: seconds until the restart


class _StopRequested(Exception):  # noqa: N818 - not an error
    """Ends the keeper's current wait."""


class WorkerKeeper:
    """Restarts one worker until the supervisor stops.

    `wait` sleeps for some seconds and returns whether to stop, as `threading.Event.wait` does.
    `load_lock` is held while the worker loads.
    """

    def __init__(
        self,
        worker: Worker,
        report: Callable[[KeeperEvent], None],
        *,
        wait: Callable[[float], bool],
        load_lock: AbstractContextManager[object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._report = report
        self._wait = wait
        self._load_lock = load_lock or nullcontext()
        self._clock = clock
        self._deaths = 0
        self._next_pause_s = FIRST_RESTART_PAUSE_S

    def run(self) -> None:
        """Keep the worker running; the worker is stopped when this returns."""
        try:
            with suppress(_StopRequested):
                while True:
                    self._run_until_restart()
        finally:
            self._worker.stop()
            self._report(KeeperEvent(self._worker.name, KeeperState.STOPPED))

    def _run_until_restart(self) -> None:
        """Run the worker once, from its start to the end of the pause after its death."""
        name = self._worker.name
        ready_at: float | None = None
        self._report(KeeperEvent(name, KeeperState.QUEUED))
        with self._load_lock:
            self._pause(0)  # stop may have been requested during the wait for the lock
            started_at = self._clock()
            self._report(KeeperEvent(name, KeeperState.STARTING))
            try:
                self._worker.start()
                self._worker.wait_ready(self._pause)
            except (WorkerError, OSError) as error:
                death: Exception = error
            else:
                ready_at = self._clock()
        if ready_at is not None:
            self._report(KeeperEvent(name, KeeperState.READY, ready_at - started_at))
            death = self._watch()
        now = self._clock()
        if ready_at is not None and now - ready_at >= STABLE_S:
            self._deaths, self._next_pause_s = 0, FIRST_RESTART_PAUSE_S
        self._deaths += 1
        pause_s = self._next_pause_s
        self._next_pause_s = min(pause_s * 2, MAX_RESTART_PAUSE_S)
        self._worker.stop()  # its children may still run
        lived_s, deaths = now - started_at, self._deaths
        self._report(KeeperEvent(name, KeeperState.DIED, lived_s, str(death), deaths, pause_s))
        self._pause(pause_s)

    def _watch(self) -> WorkerError:
        """Return the cause of death once the worker dies or hangs."""
        checked_at = self._clock()
        answered = checked_at
        while True:
            self._pause(CHECK_INTERVAL_S)
            try:
                self._worker.check()
            except WorkerError as error:
                return error
            if self._clock() - checked_at < HEALTH_INTERVAL_S:
                continue
            checked_at = self._clock()
            if self._worker.is_healthy():
                answered = checked_at
            elif checked_at - answered >= MAX_UNHEALTHY_S:
                name = self._worker.name
                return WorkerError(f"{name} has not answered /health for {MAX_UNHEALTHY_S:g} s")

    def _pause(self, seconds: float) -> None:
        if self._wait(seconds):
            raise _StopRequested


class Supervisor:
    """Keeps a set of workers running from `start` to `stop`; a context manager.

    Workers with the same name in `devices` load one after the other, because vLLM measures free
    memory while it loads. `report` is called from several threads.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        report: Callable[[KeeperEvent], None],
        *,
        devices: Sequence[str | None] | None = None,
    ) -> None:
        self._stopping = threading.Event()
        load_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._threads = []
        for worker, device in zip(workers, devices or [None] * len(workers), strict=True):
            load_lock = None if device is None else load_locks[device]
            keeper = WorkerKeeper(worker, report, wait=self._stopping.wait, load_lock=load_lock)
            # A daemon, so that a second Ctrl-C exits at once; the guards kill the workers.
            self._threads.append(
                threading.Thread(target=keeper.run, name=f"keep {worker.name}", daemon=True)
            )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop all workers at the same time and wait until they have ended."""
        self._stopping.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

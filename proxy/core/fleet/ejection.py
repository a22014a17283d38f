"""Workers kept out by their breakers, and panic mode as in Envoy.

Idea: if the share of closed breakers in a pool falls below `routing.panic_threshold`, the pool's
breakers are ignored. The remaining workers could not carry the load, or the requests themselves
cause the failures. Only breakers that opened for failures count and are ignored: a busy worker is
left alone. Workers that are down do not belong to the pool. A pool is the workers of one model that
serve whole requests, or its prefill workers. A pool of one worker panics whenever its breaker
opens. During panic each request to a worker with an open breaker is a trial.

Cost: none while all breakers are closed.

How it fails: if all workers hang, clients wait for a timeout instead of a quick 503, until probes
find the workers down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role

PREFILL = Role.PREFILL
Key = tuple[str, bool]  # a model, and whether its workers prefill only


class BreakerListener(Protocol):
    """Receives the changes of breakers and pools."""

    def rests(self, worker: Worker, now: float) -> None:
        """Note that a worker's breaker has opened."""

    def is_back(self, worker: Worker) -> None:
        """Note that a worker's breaker has closed."""

    def has_left(self, worker: Worker) -> None:
        """Note that a worker was removed."""

    def panics(self, key: Key, live: int, out: int, now: float) -> None:
        """Note that a pool's breakers are ignored from now on: `out` of `live` are open."""

    def heeds(self, key: Key, live: int, out: int) -> None:
        """Note that a pool's breakers apply again."""


def key_of(worker: Worker) -> Key:
    """Return the pool of a worker."""
    return worker.model, worker.role is PREFILL


def _is_live(worker: Worker) -> bool:
    return worker.up and not worker.draining


class Ejections:
    """The open breakers and the panicking pools of one fleet."""

    __slots__ = (
        "_clock",
        "_live",
        "_moved",
        "_out",
        "_workers",
        "panics",
        "resting",
        "started",
        "threshold",
        "witness",
    )

    def __init__(
        self,
        workers: Mapping[str, Worker],
        moved: Callable[[Worker], None],
        clock: Callable[[], float],
    ) -> None:
        self.threshold = 0.0  # share of closed breakers below which a pool panics; 0: never
        self.resting: set[Worker] = set()  # workers with an open breaker
        self.panics: set[Key] = set()
        self.started: dict[Key, int] = {}  # panics per pool
        self.witness: BreakerListener | None = None
        self._workers = workers
        self._moved = moved
        self._clock = clock
        self._live: dict[Key, int] = {}  # workers of each pool that are up, cached
        # of each pool, the workers whose breakers opened for failures
        self._out: dict[Key, set[Worker]] = {}

    def set_threshold(self, threshold: float) -> None:
        """Set the panic threshold."""
        self.threshold = threshold
        self.live_changed()

    def judged(self, worker: Worker, now: float) -> None:
        """Note a change of a worker's breaker."""
        resting, witness = self.resting, self.witness
        rested = worker in resting
        rests = not worker.breaker.closed and self._workers.get(worker.name) is worker
        if not (rests or rested):
            return
        key = key_of(worker)
        if rests:
            resting.add(worker)
            worker.in_panic = key in self.panics
            if witness is not None and not rested:
                witness.rests(worker, now)
        else:
            resting.discard(worker)
            worker.in_panic = False
            if witness is not None:
                witness.is_back(worker)
        out = self._out.setdefault(key, set())
        is_out = rests and not worker.breaker.busy
        if is_out != (worker in out):
            if is_out:
                out.add(worker)
            else:
                out.remove(worker)
            self._weigh(key)

    def left(self, worker: Worker) -> None:
        """Forget a removed worker; the caller calls `live_changed` next."""
        self.resting.discard(worker)
        if self.witness is not None:
            self.witness.has_left(worker)

    def live_changed(self) -> None:
        """Count again after workers came, went, or changed."""
        self._live.clear()
        self._out.clear()
        if not self.resting and not self.panics:
            return
        keys = set(self.panics)
        for worker in self.resting:
            key = key_of(worker)
            keys.add(key)
            worker.in_panic = key in self.panics
            if not worker.breaker.busy:
                self._out.setdefault(key, set()).add(worker)
            self._moved(worker)
        for key in keys:
            self._weigh(key)

    def _weigh(self, key: Key) -> None:
        """Start or end the panic of a pool."""
        live = self._live.get(key)
        if live is None:
            same = (each for each in self._workers.values() if key_of(each) == key)
            live = self._live[key] = sum(map(_is_live, same))
        out = sum(map(_is_live, self._out.get(key, ())))
        panics = live - out < self.threshold * live
        if panics == (key in self.panics):
            return
        witness = self.witness
        if panics:
            self.panics.add(key)
            self.started[key] = self.started.get(key, 0) + 1
            if witness is not None:
                witness.panics(key, live, out, self._clock())
        else:
            self.panics.remove(key)
            if witness is not None:
                witness.heeds(key, live, out)
        for worker in self.resting:
            if key_of(worker) == key:
                worker.in_panic = panics
                self._moved(worker)

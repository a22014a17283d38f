"""Workers kept out by their breakers, and when too few are left for that: panic, as in Envoy.

Idea: a breaker moves load from a worker that fails to workers that do not. Where most of a pool's
breakers are open, either the requests break the workers or the rest can't carry the load. Below a
share of the pool with closed breakers (`routing.panic_threshold`) the breakers of the pool are
ignored: requests go to every worker that is up. So breakers never keep out more than the rest of
that share. Only breakers that opened for failures are ignored, and only they count as out: a
worker that says it is busy is left alone. Workers that are down by their probes are not part of the
pool. A pool is the workers of one model that serve requests whole, or the workers that prefill for
them. A pool of one worker panics whenever its breaker opens: no other worker could take the load.

While a pool panics, each request to a worker with an open breaker is a trial: its first token
closes the breaker, its failure keeps it open. Once enough are closed, open ones are heeded again.

Cost: nothing while all breakers are closed; a look at the open ones when one opens or closes. How
it fails: workers that hang, all of them, have every client wait for a timeout instead of a quick
503; probes are to find those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role

PREFILL = Role.PREFILL
Key = tuple[str, bool]  # a model, and whether its workers prefill only


class BreakerListener(Protocol):
    """What is told of workers that are left alone for a while."""

    def rests(self, worker: Worker, now: float) -> None:
        """Note that a worker is left alone from now on."""

    def is_back(self, worker: Worker) -> None:
        """Note that a worker is given requests again."""

    def has_left(self, worker: Worker) -> None:
        """Note that a worker was taken out, resting or not."""

    def panics(self, key: Key, live: int, out: int, now: float) -> None:
        """Note that a pool's breakers are ignored from now on: `out` of `live` are open."""

    def heeds(self, key: Key, live: int, out: int) -> None:
        """Note that a pool's breakers are heeded again."""


def key_of(worker: Worker) -> Key:
    """Return the pool of a worker."""
    return worker.model, worker.role is PREFILL


def _is_live(worker: Worker) -> bool:
    return worker.up and not worker.draining


class Ejections:
    """Of one fleet."""

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
        self.threshold = 0.0  # below which share of closed breakers a pool panics; 0: never
        self.resting: set[Worker] = set()  # with a breaker that is not closed
        self.panics: set[Key] = set()
        self.started: dict[Key, int] = {}  # how often each pool began to panic
        self.witness: BreakerListener | None = None
        self._workers = workers
        self._moved = moved
        self._clock = clock
        self._live: dict[Key, int] = {}  # workers of each pool that are up, where that was counted
        self._out: dict[Key, set[Worker]] = {}  # of each pool, the resting that failed

    def set_threshold(self, threshold: float) -> None:
        """Take what the operator states."""
        self.threshold = threshold
        self.live_changed()

    def judged(self, worker: Worker, now: float) -> None:
        """Take a change of a worker's breaker, and note when it begins to rest and when it ends."""
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
        """Forget a worker that was taken out; `live_changed` follows."""
        self.resting.discard(worker)
        if self.witness is not None:
            self.witness.has_left(worker)

    def live_changed(self) -> None:
        """Count anew: workers came, went, or became others."""
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
        """Let a pool panic, or have its breakers heeded again."""
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

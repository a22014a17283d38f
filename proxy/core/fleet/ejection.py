"""Workers kept out by their breakers, and panic mode as in Envoy.

Idea: if the share of closed breakers in a pool falls below `routing.panic_threshold`, the breakers
are ignored, except those of busy workers. A pool is the live workers of one model that serve whole
requests, or its prefill workers. During panic each request to such a worker is a trial.

Cost: none while all breakers are closed.

How it fails: if all workers hang, clients wait for a timeout, until probes fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role

PREFILL = Role.PREFILL
PoolKey = tuple[str, bool]  # model, prefill pool


class BreakerListener(Protocol):
    def breaker_opened(self, worker: Worker, now: float) -> None: ...

    def breaker_stayed_open(self, worker: Worker, now: float) -> None: ...

    def breaker_closed(self, worker: Worker) -> None: ...

    def worker_removed(self, worker: Worker) -> None: ...

    def panic_started(self, key: PoolKey, live: int, failed: int, now: float) -> None:
        """Note that a pool panics: `failed` of `live` workers are ejected."""

    def panic_ended(self, key: PoolKey, live: int, failed: int) -> None: ...


def pool_key_of(worker: Worker) -> PoolKey:
    return worker.model, worker.role is PREFILL


def _is_live(worker: Worker) -> bool:
    return worker.up and not worker.draining


class Ejections:
    """The open breakers and panicking pools of a fleet."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        load_changed: Callable[[Worker], None],
        clock: Callable[[], float],
    ) -> None:
        self.threshold = 0.0  # least share of closed breakers; 0: no panic
        self.ejected: set[Worker] = set()  # with an open breaker
        self.panics: set[PoolKey] = set()
        self.started: dict[PoolKey, int] = {}  # panics per pool
        self.listener: BreakerListener | None = None
        self._workers = workers
        self._load_changed = load_changed
        self._clock = clock
        self._live: dict[PoolKey, int] = {}  # workers that are up, cached
        self._failed: dict[PoolKey, set[Worker]] = {}  # ejected and not busy

    def set_threshold(self, threshold: float) -> None:
        self.threshold = threshold
        self.live_changed()

    def breaker_changed(self, worker: Worker, now: float) -> None:
        was_ejected = worker in self.ejected
        is_ejected = not worker.breaker.closed and self._workers.get(worker.name) is worker
        if not (is_ejected or was_ejected):
            return
        key = pool_key_of(worker)
        if is_ejected:
            self.ejected.add(worker)
        else:
            self.ejected.discard(worker)
        worker.in_panic = is_ejected and key in self.panics
        if (listener := self.listener) is not None:
            if not is_ejected:
                listener.breaker_closed(worker)
            elif was_ejected:
                listener.breaker_stayed_open(worker, now)
            else:
                listener.breaker_opened(worker, now)
        failed = self._failed.setdefault(key, set())
        has_failed = is_ejected and not worker.breaker.busy
        if has_failed != (worker in failed):
            if has_failed:
                failed.add(worker)
            else:
                failed.remove(worker)
            self._update_panic(key)

    def remove_worker(self, worker: Worker) -> None:
        """Forget a removed worker; `live_changed` must follow."""
        self.ejected.discard(worker)
        if self.listener is not None:
            self.listener.worker_removed(worker)

    def live_changed(self) -> None:
        self._live.clear()
        self._failed.clear()
        if not self.ejected and not self.panics:
            return
        keys = set(self.panics)
        for worker in self.ejected:
            key = pool_key_of(worker)
            keys.add(key)
            worker.in_panic = key in self.panics
            if not worker.breaker.busy:
                self._failed.setdefault(key, set()).add(worker)
            self._load_changed(worker)
        for key in keys:
            self._update_panic(key)

    def _update_panic(self, key: PoolKey) -> None:
        live = self._live.get(key)
        if live is None:
            same = (worker for worker in self._workers.values() if pool_key_of(worker) == key)
            live = self._live[key] = sum(map(_is_live, same))
        failed = sum(map(_is_live, self._failed.get(key, ())))
        panics = live - failed < self.threshold * live
        if panics == (key in self.panics):
            return
        listener = self.listener
        if panics:
            self.panics.add(key)
            self.started[key] = self.started.get(key, 0) + 1
            if listener is not None:
                listener.panic_started(key, live, failed, self._clock())
        else:
            self.panics.remove(key)
            if listener is not None:
                listener.panic_ended(key, live, failed)
        for worker in self.ejected:
            if pool_key_of(worker) == key:
                worker.in_panic = panics
                self._load_changed(worker)

"""The workers by name: membership, and the models and pools they form.

State belongs to the `Worker` object. A later worker of the same name is a new object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf

from proxy.core.fleet.ejection import Ejections
from proxy.core.fleet.model_lists import ModelLists
from proxy.core.fleet.pool import NO_POOL, Pool
from proxy.core.fleet.remote_load import RemoteLoad, inherit_load, set_remote_load
from proxy.core.fleet.worker import NO_LIMIT, Origin, Worker
from proxy.core.fleet.worker_load import NO_LOAD
from proxy.core.learned.prefix_index import PrefixIndex
from proxy.core.learned.sessions import Sessions
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import RequestInfo


def time_zero() -> float:
    """Return 0, so that no wait for a model list ends."""
    return 0.0


class Roster:
    def __init__(self, clock: Callable[[], float] = time_zero) -> None:
        self.version = 0  # changes with the workers
        self.prefixes = PrefixIndex()
        self.sessions = Sessions()
        # Returns the output tokens of a running stream, by its X-Request-Id.
        self.stream_tokens: Callable[[Worker, str, float], Sequence[int] | None] | None = None
        # Names a placed request in its worker's journal.
        self.name_prefix: Callable[[Worker, RequestInfo], None] | None = None
        self.by_index: dict[int, Worker] = {}
        self.remote_load: RemoteLoad | None = None  # other processes
        self.unpublished: set[Worker] = set()  # with changes that other processes do not see yet
        self._rank: Callable[[Worker], float] = lambda worker: worker.requests
        self._workers: dict[str, Worker] = {}
        self.ejections = Ejections(self._workers, self.load_changed, clock)
        self.clock = clock
        self.model_lists = ModelLists(clock)
        self._expected: tuple[str, ...] = ()  # models from the fleet file
        self._by_model: dict[str, list[Worker]] = {}
        self._pools: dict[str, Pool] = {}
        self.leaving: set[Worker] = set()  # removed, with leases in flight
        self._left_by_url: dict[str, Worker] = {}  # those without a successor
        self.numbers = count(1)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, name: object) -> bool:
        return name in self._workers

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def models(self) -> tuple[str, ...]:
        """Return the models with workers, and the expected ones."""
        return tuple(self._by_model)

    def contexts(self) -> dict[str, int | None]:
        """Return the models of live workers, with their largest contexts."""
        largest: dict[str, int | None] = {}
        for worker in self:
            if not worker.is_live:
                continue
            for model in worker.models:
                limits = [limit for limit in (largest.get(model), worker.max_model_len) if limit]
                largest[model] = max(limits, default=None)
        return largest

    def origin(self, model: str) -> Origin:
        """Return the loaded model, and the base model of an adapter."""
        live = (worker for worker in self.workers_of(model) if worker.is_live)
        origins = (worker.origins[model] for worker in live if model in worker.origins)
        return next(origins, (None, None))

    def serves(self, model: str) -> bool:
        return model in self._by_model

    def all_listed(self, model: str = "") -> bool:
        """Return whether no further worker may list this model."""
        return self.model_lists.are_complete(model, self._workers.values())

    def workers_of(self, model: str) -> list[Worker]:
        """Return the workers of a model. Read-only."""
        return self._by_model.get(model, [])

    def pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        return pool if pool is not None else self._make_pool(model)

    def _make_pool(self, model: str) -> Pool:
        workers = self._by_model.get(model)
        if not workers:
            return NO_POOL
        for other, pool in self._pools.items():  # adapters have the same workers
            if self._by_model[other] == workers:
                self._pools[model] = pool
                return pool
        for worker in workers:
            if worker.ranked_in:  # sorted by its key in another pool
                self.load_changed(worker)
            else:
                worker.rank_key = inf if worker.unavailable else self._rank(worker)
        pool = self._pools[model] = Pool(workers)
        return pool

    def rank_by(self, rank: Callable[[Worker], float]) -> None:
        """Sort large groups by this key."""
        self._rank = rank
        self.live_changed()

    # Membership

    def expect(self, models: Iterable[str]) -> None:
        """Set the models that are known even without workers."""
        self._expected = tuple(dict.fromkeys(models))
        self._rebuild_models()

    def add(self, spec: WorkerSpec) -> Worker:
        """Add a worker. Requests need a good probe first."""
        if spec.name in self._workers:
            raise ValueError(f"worker {spec.name!r} is in the fleet already")
        worker = self._create_worker(spec, next(self._free()))
        self._rebuild_models()
        return worker

    def _free(self) -> Iterator[int]:
        taken = {*self.by_index, *(worker.index for worker in self.leaving)}
        for index in count():
            if index not in taken:
                yield index

    def _create_worker(self, spec: WorkerSpec, index: int) -> Worker:
        worker = Worker(spec, index)
        worker.awaited_since = self.clock()
        worker.last_used = next(self.numbers)
        self._workers[spec.name] = self.by_index[index] = worker
        if self._left_by_url and (before := self._left_by_url.pop(spec.url, None)) is not None:
            before.successor = worker
            worker.due_at = before.due_at
            self.pass_to_successor(before)
        return worker

    def contains(self, worker: Worker) -> bool:
        """Return False if the worker was removed."""
        return self.by_index.get(worker.index) is worker

    def expect_prefix(self, info: RequestInfo, worker: Worker) -> None:
        if not self.contains(worker):
            return
        self.prefixes.record(info.prefix, worker.index)
        if worker.reports_prefixes and self.name_prefix is not None and info.prompts == 1:
            self.name_prefix(worker, info)

    def remove(self, name: str) -> Worker | None:
        """Remove a worker. Leases in flight are still released to it."""
        worker = self._workers.get(name)
        if worker is not None:
            self._detach_worker(worker)
            self._rebuild_models()
        return worker

    def _detach_worker(self, worker: Worker) -> None:
        del self._workers[worker.name]
        worker.draining = True
        self.ejections.remove_worker(worker)
        del self.by_index[worker.index]
        self.prefixes.forget(worker.index)
        set_remote_load(worker, NO_LOAD, worker.free_at)
        if worker.requests or worker.unfetched_handovers:
            self.leaving.add(worker)
            self._left_by_url[worker.url] = worker

    def is_filled_elsewhere(self, worker: Worker, now: float) -> bool:
        others = self.remote_load
        return (
            others is not None
            and worker.request_limit != NO_LIMIT
            and others.is_filled_by_others(worker, now)
        )

    def pass_to_successor(self, worker: Worker) -> None:
        if (successor := worker.successor) is not None:
            inherit_load(successor, worker)
            self.load_changed(successor)
        if not (worker.requests or worker.unfetched_handovers):
            self.leaving.discard(worker)
            if self._left_by_url.get(worker.url) is worker:
                del self._left_by_url[worker.url]

    def swap(self, removed: Iterable[Worker], come: Iterable[WorkerSpec]) -> None:
        for worker in removed:
            self._detach_worker(worker)
        free = self._free()
        for spec in come:
            self._create_worker(spec, next(free))
        self._rebuild_models()

    def replace(self, specs: Iterable[WorkerSpec]) -> None:
        """Replace the workers; the same address and model keep their state."""
        wanted = {spec.name: spec for spec in specs}
        removed = []
        for worker in self:
            spec = wanted.get(worker.name)
            if spec is None or not worker.matches(spec):
                removed.append(worker)
            else:
                del wanted[worker.name]
                worker.respecify(spec)
                self.load_changed(worker)
        self.swap(removed, wanted.values())

    def respecify(self, worker: Worker, spec: WorkerSpec) -> None:
        """Apply a spec with the same address and model."""
        worker.respecify(spec)
        self.load_changed(worker)
        self.live_changed()

    def drain(self, name: str, *, draining: bool = True, starts: bool = False) -> bool:
        """Start or stop draining; False without such a worker.

        `starts`: its model list is still waited for.
        """
        worker = self._workers.get(name)
        if worker is None:
            return False
        if not draining and worker.awaited_since == -inf:
            worker.awaited_since = self.clock()
        elif draining and not starts:
            worker.awaited_since = -inf
        worker.draining = draining
        self.live_changed()
        return True

    def set_served(
        self,
        name: str,
        models: Iterable[str],
        max_model_len: int | None = None,
        origins: Mapping[str, Origin] | None = None,
    ) -> None:
        """Apply a model list; a shorter configured context wins."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.models = tuple(models) or (worker.model,)
            worker.origins = dict(origins or {})
            self.model_lists.add(worker.models)
            worker.reported_max_model_len = max_model_len
            worker.respecify(worker.spec)
            self._rebuild_models()

    def _rebuild_models(self) -> None:
        by_model: dict[str, list[Worker]] = {model: [] for model in self._expected}
        for worker in self:
            for model in dict.fromkeys((worker.model, *worker.models)):
                workers = by_model.setdefault(model, [])
                if model in worker.models:
                    workers.append(worker)
        self._by_model = by_model
        self.model_lists.set_empty_pools([model for model in self._expected if not by_model[model]])
        self.live_changed()

    def live_changed(self) -> None:
        self.version += 1
        for pool in self._pools.values():
            if pool.ranked:
                for worker in pool.members:
                    worker.ranked_in = ()
        self._pools.clear()
        self.ejections.live_changed()

    def load_changed(self, worker: Worker) -> None:
        worker.unavailable = worker.is_full or (not worker.breaker.closed and worker.is_barred)
        if worker.ranked_in:
            key = inf if worker.unavailable else self._rank(worker)
            if key != worker.rank_key:
                for group in worker.ranked_in:
                    group.drop(worker)
                worker.rank_key = key
                for group in worker.ranked_in:
                    group.put(worker)
        others = self.remote_load
        if others is not None and (
            worker not in self.unpublished or worker.request_limit != NO_LIMIT
        ):
            others.publish_soon(worker)
        if self.leaving and worker in self.leaving:
            self.pass_to_successor(worker)

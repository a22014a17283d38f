"""The workers by name: who is here, for which models, and how they fare.

Workers come and go, and change, while requests are under way: what is known of one stays with its
object, and a namesake that is added later is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from math import inf

from proxy.core.fleet import kv_usage, slots
from proxy.core.fleet.breaker import Told
from proxy.core.fleet.ejection import BreakerListener, Ejections
from proxy.core.fleet.pool import NO_POOL, Pool
from proxy.core.fleet.remote_load import RemoteLoad, inherit, replace
from proxy.core.fleet.worker import Origin, Worker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.core.learned.prefix_index import PrefixIndex
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec

WAITED_S = 600.0  # for a worker, or anybody of an empty pool, to say what is served
MOST_HEARD = 10_000  # models that are known to have been served; the oldest are forgotten
STALE_S = 10.0  # a worker that had nothing to do for so long is given the benefit of the doubt
FORGIVE = 0.1


def still() -> float:
    """Tell a time at which everybody who is waited for may still come."""
    return 0.0


class Roster:
    """The workers by name. `Fleet` adds what is charged to them."""

    def __init__(
        self,
        *,
        down_after: int = 3,
        up_after: int = 2,
        clock: Callable[[], float] = still,
    ) -> None:
        self.version = 0  # changes whenever a worker comes, goes, or becomes another
        self.down_after = down_after
        self.up_after = up_after
        self.prefixes = PrefixIndex()
        self.by_index: dict[int, Worker] = {}
        self.others: RemoteLoad | None = None  # processes that charge the same workers
        self._rank: Callable[[Worker], float] = lambda worker: worker.requests
        self._workers: dict[str, Worker] = {}
        self.ejections = Ejections(self._workers, self.moved, clock)
        self._clock = clock
        self._expected: tuple[str, ...] = ()  # models, be there workers of them or not
        self._empty_since: dict[str, float] = {}  # of those, the ones that nobody is here for
        self._told_since: dict[str, float] = {}  # pools, from when their first worker was up
        self._heard: dict[str, None] = {}  # models that somebody served once, the last told last
        self._by_model: dict[str, list[Worker]] = {}
        self._pools: dict[str, Pool] = {}
        self._leaving: set[Worker] = set()  # removed, with leases in flight
        self._left: dict[str, Worker] = {}  # of those, who left an address to which nobody came
        self._numbers = count(1)

    def __iter__(self) -> Iterator[Worker]:
        """All of them, in the order they came."""
        return iter(self._workers.values())

    @property
    def resting(self) -> set[Worker]:
        """The workers with a breaker that is not closed."""
        return self.ejections.resting

    @property
    def witness(self) -> BreakerListener | None:
        """What is told of workers that are left alone for a while."""
        return self.ejections.witness

    @witness.setter
    def witness(self, witness: BreakerListener | None) -> None:
        self.ejections.witness = witness

    def __len__(self) -> int:
        """How many there are."""
        return len(self._workers)

    def __contains__(self, name: object) -> bool:
        """Whether a worker of that name is here."""
        return name in self._workers

    def get(self, name: str) -> Worker | None:
        """Find a worker by name."""
        return self._workers.get(name)

    def models(self) -> tuple[str, ...]:
        """Every model some worker is for, live or not, or is expected to be."""
        return tuple(self._by_model)

    def contexts(self) -> dict[str, int | None]:
        """Name what live workers serve, with the longest context that one offers.

        What nobody can be given now is left out, whether its workers are down or drain: who asks
        for it even so hears 503, and when to come again.
        """
        found: dict[str, int | None] = {}
        for worker in self:
            if not worker.live:
                continue
            for model in worker.models:
                limits = [limit for limit in (found.get(model), worker.max_model_len) if limit]
                found[model] = max(limits, default=None)
        return found

    def origin(self, model: str) -> Origin:
        """Say what live workers have loaded for a model, and whose adapter it is."""
        live = (worker for worker in self.of(model) if worker.live)
        told = (worker.origins[model] for worker in live if model in worker.origins)
        return next(told, (None, None))

    def serves(self, model: str) -> bool:
        """Whether some worker is for a model, live or not, or is expected to be."""
        return model in self._by_model

    def all_told(self, model: str = "") -> bool:
        """Whether nobody may still say that it serves a model: adapters are in no fleet file.

        Who was never up has not told, nor have the workers of a model that nobody is here for.
        Neither is waited for without end: one that never comes would leave every mistyped name
        possible. So would one after the other that comes: once somebody of a pool was up for as
        long, others of it are waited for with what was served before, by anybody.
        """
        due = self._clock() - WAITED_S
        heard = model in self._heard
        return not any(
            since > due and self._may_tell(pool, due, heard=heard)
            for pool, since in self._empty_since.items()
        ) and not any(
            worker.awaited_since > due
            and not (worker.up or worker.up_since)
            and self._may_tell(worker.model, due, heard=heard)
            for worker in self
            if worker.role is not Role.PREFILL  # who decodes serves the same
        )

    def _may_tell(self, pool: str, due: float, *, heard: bool) -> bool:
        return heard or self._told_since.get(pool, inf) > due

    def of(self, model: str) -> list[Worker]:
        """List the workers of a model, live or not. Not to be changed."""
        return self._by_model.get(model, [])

    def pool(self, model: str) -> Pool:
        """Return what is live of a model."""
        found = self._pools.get(model)
        return found if found is not None else self._make_pool(model)

    def _make_pool(self, model: str) -> Pool:
        workers = self._by_model.get(model)
        if not workers:
            return NO_POOL
        for other, pool in self._pools.items():  # adapters: the same workers by other names
            if self._by_model[other] == workers:
                self._pools[model] = pool
                return pool
        for worker in workers:
            if worker.ranked_in:  # another model's pool finds it by the key it has
                self.moved(worker)
            else:
                worker.key = inf if worker.shut else self._rank(worker)
        pool = self._pools[model] = Pool(workers)
        return pool

    def rank_by(self, rank: Callable[[Worker], float]) -> None:
        """Keep large groups in this order, the least first."""
        self._rank = rank
        self._live_changed()

    # Who is here

    def expect(self, models: Iterable[str]) -> None:
        """Take these models for known, whoever is here: who is for them comes and goes."""
        self._expected = tuple(dict.fromkeys(models))
        self._changed()

    def add(self, spec: WorkerSpec) -> Worker:
        """Take in a worker; it has to be probed before it is given anything."""
        if spec.name in self._workers:
            raise ValueError(f"worker {spec.name!r} is in the fleet already")
        worker = self._take_in(spec, next(self._free()))
        self._changed()
        return worker

    def _free(self) -> Iterator[int]:
        """Name indexes that are nobody's."""
        taken = {*self.by_index, *(worker.index for worker in self._leaving)}
        for index in count():
            if index not in taken:
                yield index

    def _take_in(self, spec: WorkerSpec, index: int) -> Worker:
        worker = Worker(spec, index)
        worker.awaited_since = self._clock()
        worker.served = next(self._numbers)
        self._workers[spec.name] = self.by_index[index] = worker
        if self._left and (before := self._left.pop(spec.url, None)) is not None:
            before.heir = worker
            worker.due_at = before.due_at
            self._hand_down(before)
        return worker

    def remove(self, name: str) -> Worker | None:
        """Take a worker out; its leases in flight are still released to it."""
        worker = self._workers.get(name)
        if worker is not None:
            self._take_out(worker)
            self._changed()
        return worker

    def _take_out(self, worker: Worker) -> None:
        del self._workers[worker.name]
        worker.draining = True
        self.ejections.left(worker)
        del self.by_index[worker.index]
        self.prefixes.forget(worker.index)
        replace(worker, NO_LOAD, worker.free_at)
        if worker.requests or worker.pinned:
            self._leaving.add(worker)
            self._left[worker.url] = worker

    def _hand_down(self, worker: Worker) -> None:
        """Charge what is charged to a removed worker to its heir, if it has one."""
        if (heir := worker.heir) is not None:
            inherit(heir, worker)
            self.moved(heir)
        if not (worker.requests or worker.pinned):
            self._leaving.discard(worker)
            if self._left.get(worker.url) is worker:
                del self._left[worker.url]

    def swap(self, gone: Iterable[Worker], come: Iterable[WorkerSpec]) -> None:
        """Take workers out and others in: as `remove` and `add`, and one change however many."""
        for worker in gone:
            self._take_out(worker)
        free = self._free()
        for spec in come:
            self._take_in(spec, next(free))
        self._changed()

    def replace(self, specs: Iterable[WorkerSpec]) -> None:
        """Become these workers; one whose address and model stay keeps all that is known of it."""
        wanted = {spec.name: spec for spec in specs}
        gone = []
        for worker in self:
            spec = wanted.get(worker.name)
            if spec is None or not worker.is_meant_by(spec):
                gone.append(worker)
            else:
                del wanted[worker.name]
                worker.respecify(spec)
                self.moved(worker)
        self.swap(gone, wanted.values())

    def respecify(self, worker: Worker, spec: WorkerSpec) -> None:
        """Take what is stated of a worker that is here now; its address and model are the same."""
        worker.respecify(spec)
        self.moved(worker)
        self._live_changed()

    def drain(self, name: str, *, draining: bool = True, starts: bool = False) -> bool:
        """Give a worker nothing more, or something again; False when there is none of the name.

        `starts`: it is not ready yet. Of any other that was never up nobody waits for a word.
        """
        worker = self._workers.get(name)
        if worker is None:
            return False
        if not draining and worker.awaited_since == -inf:
            worker.awaited_since = self._clock()
        elif draining and not starts:
            worker.awaited_since = -inf
        worker.draining = draining
        self._live_changed()
        return True

    def set_served(
        self,
        name: str,
        models: Iterable[str],
        max_model_len: int | None = None,
        origins: Mapping[str, Origin] | None = None,
    ) -> None:
        """Take what a worker's /v1/models says; a shorter context that is stated stands."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.models = tuple(models) or (worker.model,)
            worker.origins = dict(origins or {})
            self._hear(worker.models)
            worker.told_max_model_len = max_model_len
            worker.respecify(worker.spec)
            self._changed()

    def _hear(self, models: Iterable[str]) -> None:
        heard = self._heard
        for model in models:
            heard.pop(model, None)
            heard[model] = None
        while len(heard) > MOST_HEARD:
            del heard[next(iter(heard))]

    def _told(self, worker: Worker) -> None:
        if worker.role is not Role.PREFILL:
            self._told_since.setdefault(worker.model, self._clock())

    def _changed(self) -> None:
        by_model: dict[str, list[Worker]] = {model: [] for model in self._expected}
        for worker in self:
            for model in dict.fromkeys((worker.model, *worker.models)):
                workers = by_model.setdefault(model, [])
                if model in worker.models:
                    workers.append(worker)
        self._by_model = by_model
        before, now = self._empty_since, self._clock()
        self._empty_since = {
            model: before.get(model, now) for model in self._expected if not by_model[model]
        }
        self._live_changed()

    def _live_changed(self) -> None:
        self.version += 1
        for pool in self._pools.values():
            if pool.ranked:
                for worker in pool.members:
                    worker.ranked_in = ()
        self._pools.clear()
        self.ejections.live_changed()

    # How they fare

    def probe_ok(self, name: str, now: float) -> bool:
        """Take a probe's good answer; True if the worker has just come up."""
        worker = self._workers.get(name)
        if worker is None:
            return False
        worker.failed_probes = 0
        worker.good_probes += 1
        if worker.up or (worker.probed and worker.good_probes < self.up_after):
            return False
        if worker.probed:  # it was down: nothing says that its cache is what it was
            self.prefixes.forget(worker.index)
        worker.up = worker.probed = True
        worker.up_since = now
        self._told(worker)
        worker.pace.seen_at = now
        if not worker.pace.prefills:
            self._borrow(worker)
        self._live_changed()
        return True

    def probe_failed(self, name: str, now: float, why: str = "") -> bool:  # noqa: ARG002
        """Take a probe's failure; True if the worker has just gone down."""
        worker = self._workers.get(name)
        if worker is None:
            return False
        worker.good_probes = 0
        worker.failed_probes += 1
        worker.probed = True
        worker.trouble = why
        if not worker.up or worker.failed_probes < self.down_after:
            return False
        worker.up = False
        self._live_changed()
        return True

    def follow(
        self,
        worker: Worker,
        *,
        up: bool,
        probed: bool,
        up_since: float,
        awaited_since: float,
        draining: bool,
    ) -> None:
        """Take what another process, that probes, has found of a worker that is here."""
        worker.awaited_since = awaited_since
        if worker.up_since != up_since:
            if worker.probed:
                self.prefixes.forget(worker.index)  # it was started anew
            worker.up_since = up_since
        if up and not worker.up:
            self._told(worker)
            worker.pace.seen_at = up_since
            if not worker.pace.prefills:
                self._borrow(worker)
        changed = (worker.up, worker.draining) != (up, draining)
        worker.up, worker.probed, worker.draining = up, probed, draining
        if changed:
            self._live_changed()

    def failed(
        self,
        worker: Worker,
        now: float,
        retry_after_s: float | None = None,
        *,
        busy: bool = False,
        why: str = "",
    ) -> None:
        """Note that a request failed on a worker, and why: see `Breaker`."""
        worker.breaker.failed(now, retry_after_s, busy=busy, why=why)
        self._judged(worker, now)

    def succeeded(self, worker: Worker) -> None:
        """Note that a request was answered."""
        worker.breaker.succeeded()
        self._judged(worker, 0.0)

    def _judged(self, worker: Worker, now: float) -> None:
        self.ejections.judged(worker, now)
        self.moved(worker)

    def set_gauges(self, name: str, gauges: Gauges) -> None:
        """Take what a worker's /metrics says."""
        worker = self._workers.get(name)
        if worker is None:
            return
        before, worker.gauges = worker.gauges, gauges
        if before is not None and gauges.computed > before.computed:
            worker.worked_at = gauges.at
        worker.kv_capacity = gauges.kv_capacity_tokens or 0
        # The page is a moment old: only what two of them show is nobody's request of ours.
        strangers = max(gauges.running + gauges.waiting - worker.sequences, 0)
        worker.strangers = min(strangers, worker.strangers_before)
        worker.strangers_before = strangers
        # What is charged may be computed in part: strangers' work is taken too low, never too high.
        backlog = gauges.extra.get("backlog", 0.0)
        strange = max(backlog - worker.prefill_tokens, 0.0) if strangers else 0.0
        worker.strange_tokens = min(strange, worker.strange_tokens_before)
        worker.strange_tokens_before = strange
        longs = gauges.extra.get("backlog_long", 0.0) / backlog if backlog else 0.0
        worker.strange_long = worker.strange_tokens * longs
        slots.learn(worker, gauges)
        kv_usage.learn(worker, gauges, worker.queued_before)
        if gauges.at - worker.pace.seen_at > STALE_S and not worker.requests:
            self._forgive(worker)
        worker.reprice()
        self.moved(worker)

    def no_gauges(self, name: str, now: float) -> None:
        """Note that a worker is well and tells no gauges; soon the last say nothing of now."""
        worker = self._workers.get(name)
        if worker is None or worker.gauges is None:
            return
        if now - worker.gauges.at > slots.HEEDED_S:
            self.forget_gauges(worker)

    def forget_gauges(self, worker: Worker) -> None:
        """Forget what only a worker's page tells; what its cache holds in all stays known."""
        if worker.gauges is None:
            return
        worker.gauges = None
        worker.strangers = worker.strangers_before = 0
        worker.strange_tokens = worker.strange_tokens_before = worker.strange_long = 0.0
        worker.kv_spare = 0
        slots.forget(worker)
        worker.reprice()
        self.moved(worker)

    def _forgive(self, worker: Worker) -> None:
        """Let a worker that looks slow be tried again: it may have been a bad moment."""
        peers = [w.pace for w in self.of(worker.model) if w.pace.prefills]
        best = min(peers, key=lambda pace: pace.token_s, default=worker.pace)
        if best.token_s < worker.pace.token_s:
            worker.pace.adopt(best, FORGIVE)

    def _borrow(self, worker: Worker) -> None:
        """Take a new worker to be like the best known of its model."""
        peers = [w for w in self.of(worker.model) if w.pace.prefills]
        if peers:
            worker.pace.adopt(max(peers, key=lambda w: w.pace.prefills).pace)
            worker.reprice()

    def moved(self, worker: Worker) -> None:
        """Keep what pools rely on true: a worker's load has changed."""
        worker.shut = worker.full or (not worker.breaker.closed and worker.barred)
        if worker.ranked_in:
            key = inf if worker.shut else self._rank(worker)
            if key != worker.key:
                for group in worker.ranked_in:
                    group.drop(worker)
                worker.key = key
                for group in worker.ranked_in:
                    group.put(worker)
        if self.others is not None:
            self.others.changed(worker)
        if self._leaving and worker in self._leaving:
            self._hand_down(worker)

    # What other processes say

    def charged_elsewhere(
        self, worker: Worker, load: WorkerLoad, due_at: float, now: float
    ) -> None:
        """Take what others have charged to a worker, and when they expect to hear of it."""
        if self._workers.get(worker.name) is not worker:
            return  # gone: nobody would tell of what they give back
        replace(worker, load, now)
        worker.due_at = max(worker.due_at, due_at)
        self.moved(worker)

    def judged_elsewhere(self, worker: Worker, told: Told) -> None:
        """Take what another process has made of a worker's breaker."""
        worker.breaker.take(told)
        self._judged(worker, self._clock())

"""Replicates the leader's fleet in every process.

Only the leader probes, discovers workers and handles admin requests. A few times a second it sends
its workers' new states, not events, so a process that joins late or misses a message catches up.
The supervisor of a host's only process needs to know which workers have which rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import product
from typing import NamedTuple

from proxy.core.fleet.worker import Worker
from proxy.core.learned.latency import PARTS, LatencyModel
from proxy.core.router import Router
from proxy.discovery.discovery import Discovery
from proxy.discovery.endpoints import Endpoints
from proxy.processes.ipc_messages import KnownWorker, WorkersChanged
from proxy.processes.shared.load import SharedLoad, WorkerRows
from proxy.processes.shared.process_sheet import MAX_WORKERS

logger = logging.getLogger(__name__)

NO_ROW = -1
Life = tuple[str, float]  # a worker's name, and when it was up


class AssignedRow(NamedTuple):
    """A worker's row in the shared table."""

    row: int
    since: float  # time of the assignment


class FleetReplica:
    def __init__(
        self,
        router: Router,
        discovery: Discovery,
        shared_load: SharedLoad,
        clock: Callable[[], float],
        *,
        alone: bool = False,
    ) -> None:
        self._router = router
        self._discovery = discovery
        self._alone = alone
        self._discovered: Mapping[str, Endpoints] = {}
        self._fleet = router.fleet
        self._shared_load = shared_load
        self._clock = clock
        self._rows = WorkerRows(shared_load, clock)
        self._rows_of: dict[Worker, AssignedRow] = {}
        self._sent_states: dict[Worker, tuple[object, ...]] = {}
        self._sent_links: set[tuple[Life, Life]] = set()
        self._checked_versions = (-1, -1)  # versions of links and fleet at the last check
        self._sends_all = False

    # Leader

    def lead(self) -> None:
        """Continue as leader from the replicated state."""
        self._rows.adopt({assigned.row for assigned in self._rows_of.values()})
        self._discovery.adopt(self._discovered)

    def send_all_next(self) -> None:
        """Send everything with the next message, because a process joined."""
        self._sent_states.clear()
        self._sent_links.clear()
        self._checked_versions = (-1, -1)
        self._discovered = {}
        self._sends_all = True

    def changes(self) -> WorkersChanged | None:
        """Return the changes since the last call; None without changes."""
        removed = [
            worker for worker in self._rows_of if self._fleet.roster.get(worker.name) is not worker
        ]
        for worker in removed:
            if (row := self._rows_of[worker].row) != NO_ROW:
                self._rows.release(row)
            self._forget_worker(worker)
        changed = []
        for worker in self._fleet.roster:
            if worker not in self._rows_of:
                self._assign_row(worker)
            state = self._state(worker)
            if self._sent_states.get(worker) != state:
                self._sent_states[worker] = state
                changed.append(self._describe_worker(worker))
        warm = self._warm_links()
        send_all, self._sends_all = self._sends_all, False
        endpoints = self._discovery.endpoints_by_pool()
        discovered = None if endpoints == self._discovered else endpoints
        self._discovered = endpoints
        if not (changed or removed or warm or send_all or discovered):
            return None
        names = tuple(worker.name for worker in removed if worker.name not in self._fleet.roster)
        return WorkersChanged(tuple(changed), names, send_all, warm, discovered)

    def _state(self, worker: Worker) -> tuple[object, ...]:
        """Return what the receivers must know anew if it changes."""
        if self._alone:
            return (worker.spec,)
        return (
            worker.spec,
            worker.up,
            worker.probed,
            worker.up_since,
            worker.awaited_since,
            worker.draining,
            worker.models,
            worker.origins,
            worker.reported_max_model_len,
            id(worker.gauges),
        )

    def _assign_row(self, worker: Worker) -> None:
        row = self._rows.take()
        if row is None:
            logger.error(
                "worker %s: more than %d workers; its charges are not shared between processes",
                worker.name,
                MAX_WORKERS,
            )
            self._rows_of[worker] = AssignedRow(NO_ROW, 0.0)
        else:
            self._share_row(worker, AssignedRow(row, self._clock()))

    def _describe_worker(self, worker: Worker) -> KnownWorker:
        row, since = self._rows_of[worker]
        pace = worker.pace
        return KnownWorker(
            spec=worker.spec,
            row=None if row == NO_ROW else row,
            since=since,
            up=worker.up,
            probed=worker.probed,
            up_since=worker.up_since,
            awaited_since=worker.awaited_since,
            draining=worker.draining,
            models=worker.models,
            reported_max_model_len=worker.reported_max_model_len,
            gauges=worker.gauges,
            pace=tuple(getattr(pace, part) for part in PARTS) if pace.prefills else None,
            origins=worker.origins,
        )

    def _warm_links(self) -> tuple[tuple[str, str], ...]:
        links = self._router.placer.links
        seen = links.version, self._fleet.roster.version
        if not links.are_made or seen == self._checked_versions:
            return ()
        self._checked_versions = seen
        lives = {*map(_life, self._fleet.roster)}
        self._sent_links = {link for link in self._sent_links if lives.issuperset(link)}
        warm = []
        for pool in {self._fleet.roster.pool(model) for model in self._fleet.roster.models()}:
            for prefill, decode in product(pool.prefills, pool.all):
                link = _life(prefill), _life(decode)
                if link not in self._sent_links and links.is_warm(prefill, decode):
                    self._sent_links.add(link)
                    warm.append((prefill.name, decode.name))
        return tuple(warm)

    # Followers

    def apply(self, changes: WorkersChanged) -> None:
        removed = set(changes.removed)
        if changes.complete:
            removed |= {worker.name for worker in self._fleet.roster}
            removed -= {known.spec.name for known in changes.known}
        self._swap_workers(removed, changes.known)
        for known in changes.known:
            if (worker := self._fleet.roster.get(known.spec.name)) is not None:
                self._apply_worker(worker, known)
        if removed:
            self._router.placer.links.keep_only({*self._fleet.roster})
        if changes.discovered is not None:
            self._discovered = changes.discovered
        for first, second in changes.warm_links:
            prefill, decode = self._fleet.roster.get(first), self._fleet.roster.get(second)
            if prefill is not None and decode is not None:
                self._router.placer.links.set_warm(prefill, decode)

    def _swap_workers(self, names: Collection[str], known_workers: Iterable[KnownWorker]) -> None:
        """Remove and add workers in one operation, because there may be a thousand."""
        fleet = self._fleet
        removed = [worker for name in names if (worker := fleet.roster.get(name)) is not None]
        added = []
        for known in known_workers:
            worker = fleet.roster.get(known.spec.name)
            if worker is None or self._is_replaced(worker, known):
                added.append(known.spec)
                if worker is not None:
                    removed.append(worker)
        if not (removed or added):
            return
        fleet.roster.swap(removed, added)
        for worker in removed:
            self._forget_worker(worker)

    def _is_replaced(self, worker: Worker, known: KnownWorker) -> bool:
        assigned = _assigned_row_of(known)
        return not worker.matches(known.spec) or self._rows_of.get(worker, assigned) != assigned

    def _apply_worker(self, worker: Worker, known: KnownWorker) -> None:
        spec, fleet = known.spec, self._fleet
        if worker.spec != spec:
            fleet.roster.respecify(worker, spec)
        if worker not in self._rows_of:
            self._share_row(worker, _assigned_row_of(known))
        if known.pace is not None and not worker.pace.prefills:
            worker.pace.adopt(_pace(known.pace))
            worker.reprice()
        served = known.models, known.reported_max_model_len, known.origins
        if served != (worker.models, worker.reported_max_model_len, worker.origins):
            fleet.roster.set_served(spec.name, *served)
        if known.gauges is None:
            fleet.health.forget_gauges(worker)
        elif not worker.gauges or known.gauges.at > worker.gauges.at:
            fleet.health.set_gauges(spec.name, known.gauges)
        fleet.health.apply_health(
            worker,
            up=known.up,
            probed=known.probed,
            up_since=known.up_since,
            awaited_since=known.awaited_since,
            draining=known.draining,
        )

    def _share_row(self, worker: Worker, assigned: AssignedRow) -> None:
        self._rows_of[worker] = assigned
        if assigned.row != NO_ROW:
            self._shared_load.share_worker(worker, *assigned)

    def _forget_worker(self, worker: Worker) -> None:
        self._rows_of.pop(worker, None)
        self._sent_states.pop(worker, None)
        self._shared_load.forget_worker(worker)


def _life(worker: Worker) -> Life:
    return worker.name, worker.up_since


def _assigned_row_of(known: KnownWorker) -> AssignedRow:
    return AssignedRow(NO_ROW if known.row is None else known.row, known.since)


def _pace(parts: tuple[float, ...]) -> LatencyModel:
    pace = LatencyModel()
    for name, value in zip(PARTS, parts, strict=True):
        setattr(pace, name, value)
    return pace

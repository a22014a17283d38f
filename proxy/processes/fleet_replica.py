"""Every process's fleet is the leader's.

The leader alone probes, discovers and is told by operators. What has changed of its workers it says
a few times a second; the others become that. What is said is how things are, not what happened: one
who comes late, or missed something, is as well off as the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from proxy.core.learned.latency import PARTS, LatencyModel
from proxy.processes.ipc_messages import KnownWorker, WorkersChanged
from proxy.processes.shared.load import SharedLoad, WorkerRows
from proxy.processes.shared.shared_memory import MOST_WORKERS

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.core.router import Router
    from proxy.discovery.discovery import Discovery
    from proxy.discovery.endpoints import Endpoints

logger = logging.getLogger(__name__)

Place = tuple[int, float]  # a row, and since when


class FleetReplica:
    """Tells of a fleet, or makes one what is told."""

    def __init__(
        self,
        router: Router,
        discovery: Discovery,
        sharing: SharedLoad,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._discovery = discovery
        self._found: Mapping[str, Endpoints] = {}
        self._fleet = router.fleet
        self._sharing = sharing
        self._rows = WorkerRows(sharing, clock)
        self._places: dict[Worker, Place] = {}
        self._said: dict[Worker, tuple[object, ...]] = {}
        self._warm: set[tuple[str, float, str, float]] = set()
        self._seen = (-1, -1)  # versions of links and fleet, when these were looked at last
        self._full = False

    # Of who leads

    def lead(self) -> None:
        """Go on from here."""
        self._rows.adopt(self._places)
        self._discovery.adopt(self._found)

    def forget(self) -> None:
        """Say everything anew: somebody has joined."""
        self._said.clear()
        self._warm.clear()
        self._seen = (-1, -1)
        self._found = {}
        self._full = True

    def changes(self) -> WorkersChanged | None:
        """Say what has changed since this was asked last."""
        gone = [worker for worker in self._places if self._fleet.get(worker.name) is not worker]
        for worker in gone:
            self._rows.leave(worker)
            self._leave(worker)
        known = []
        for worker in self._fleet:
            if worker not in self._places:
                self._give(worker)
            brief = (
                worker.spec,
                worker.up,
                worker.probed,
                worker.up_since,
                worker.awaited_since,
                worker.draining,
                worker.models,
                worker.origins,
                worker.told_max_model_len,
                id(worker.gauges),
            )
            if self._said.get(worker) != brief:
                self._said[worker] = brief
                known.append(self._known(worker))
        warm = self._warmed()
        everything, self._full = self._full, False
        found = self._discovery.known()
        news = None if found == self._found else found
        self._found = found
        if not (known or gone or warm or everything or news):
            return None
        names = tuple(worker.name for worker in gone if worker.name not in self._fleet)
        return WorkersChanged(tuple(known), names, everything, warm, news)

    def _give(self, worker: Worker) -> None:
        place = self._rows.of(worker)
        if place is None:
            logger.error(
                "worker %s: there are more than %d; what is charged to it is not shared between "
                "processes",
                worker.name,
                MOST_WORKERS,
            )
            place = -1, 0.0
        self._take_place(worker, place)

    def _known(self, worker: Worker) -> KnownWorker:
        row, since = self._places[worker]
        pace = worker.pace
        return KnownWorker(
            spec=worker.spec,
            row=None if row < 0 else row,
            since=since,
            up=worker.up,
            probed=worker.probed,
            up_since=worker.up_since,
            awaited_since=worker.awaited_since,
            draining=worker.draining,
            models=worker.models,
            told_max_model_len=worker.told_max_model_len,
            gauges=worker.gauges,
            pace=tuple(getattr(pace, part) for part in PARTS) if pace.prefills else None,
            origins=worker.origins,
        )

    def _warmed(self) -> tuple[tuple[str, str], ...]:
        links = self._router.links
        seen = links.version, self._fleet.version
        if not links.are_made or seen == self._seen:
            return ()
        self._seen = seen
        here = {(worker.name, worker.up_since) for worker in self._fleet}
        self._warm = {key for key in self._warm if key[:2] in here and key[2:] in here}
        found = []
        for pool in {self._fleet.pool(model) for model in self._fleet.models()}:
            for prefill in pool.prefills:
                for decode in pool.all:
                    key = prefill.name, prefill.up_since, decode.name, decode.up_since
                    if key not in self._warm and links.knows(prefill, decode):
                        self._warm.add(key)
                        found.append((prefill.name, decode.name))
        return tuple(found)

    # Of the others

    def take(self, told: WorkersChanged) -> None:
        """Become what the leader says."""
        gone = set(told.gone)
        if told.all:
            gone |= {worker.name for worker in self._fleet}
            gone -= {known.spec.name for known in told.known}
        self._swap(gone, told.known)
        for known in told.known:
            if (worker := self._fleet.get(known.spec.name)) is not None:
                self._take(worker, known)
        if gone:
            self._router.links.keep({*self._fleet})
        if told.found is not None:
            self._found = told.found
        for first, second in told.warm:
            prefill, decode = self._fleet.get(first), self._fleet.get(second)
            if prefill is not None and decode is not None:
                self._router.links.warm(prefill, decode)

    def _swap(self, names: Collection[str], told: Iterable[KnownWorker]) -> None:
        """Take out who is gone and in who is new, all at once: there may be a thousand."""
        fleet = self._fleet
        gone = [worker for name in names if (worker := fleet.get(name)) is not None]
        come = []
        for known in told:
            worker = fleet.get(known.spec.name)
            if worker is None or self._is_another(worker, known):
                come.append(known.spec)
                if worker is not None:
                    gone.append(worker)
        if not (gone or come):
            return
        fleet.swap(gone, come)
        for worker in gone:
            self._leave(worker)

    def _is_another(self, worker: Worker, known: KnownWorker) -> bool:
        """Whether this is a namesake."""
        place = _place(known)
        return not worker.is_meant_by(known.spec) or self._places.get(worker, place) != place

    def _take(self, worker: Worker, known: KnownWorker) -> None:
        spec, fleet = known.spec, self._fleet
        if worker.spec != spec:
            fleet.respecify(worker, spec)
        if worker not in self._places:
            self._take_place(worker, _place(known))
        if known.pace is not None and not worker.pace.prefills:
            worker.pace.adopt(_pace(known.pace))
            worker.reprice()
        told = known.models, known.told_max_model_len, known.origins
        if told != (worker.models, worker.told_max_model_len, worker.origins):
            fleet.set_served(spec.name, *told)
        if known.gauges is None:
            fleet.forget_gauges(worker)
        elif not worker.gauges or known.gauges.at > worker.gauges.at:
            fleet.set_gauges(spec.name, known.gauges)
        fleet.follow(
            worker,
            up=known.up,
            probed=known.probed,
            up_since=known.up_since,
            awaited_since=known.awaited_since,
            draining=known.draining,
        )

    def _take_place(self, worker: Worker, place: Place) -> None:
        self._places[worker] = place
        if place[0] >= 0:
            self._sharing.place(worker, *place)

    def _leave(self, worker: Worker) -> None:
        self._places.pop(worker, None)
        self._said.pop(worker, None)
        self._sharing.leave(worker)


def _place(known: KnownWorker) -> Place:
    return (-1 if known.row is None else known.row), known.since


def _pace(parts: tuple[float, ...]) -> LatencyModel:
    pace = LatencyModel()
    for name, value in zip(PARTS, parts, strict=True):
        setattr(pace, name, value)
    return pace

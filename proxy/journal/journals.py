"""The journals of all workers in a fleet. Each router process reads them by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import Worker
from proxy.core.learned.resident_prefixes import ResidentPrefixes, name_of
from proxy.core.model.types import RequestInfo
from proxy.metrics.journal_counts import JournalCount

if TYPE_CHECKING:
    import zmq

    from proxy.journal.engine_state import EngineJournal
    from proxy.journal.subscriber import JournalSubscriber

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 0.25  # of workers, and of silent engines
MAX_SOCKETS: Final = 16_384


class Journals:
    def __init__(self, roster: Roster, key: bytes | None) -> None:
        self._roster = roster
        self._key = key
        self._version = -1  # of the roster at the last look
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._subscribers: dict[Worker, list[JournalSubscriber]] = {}
        self._endpoints: dict[Worker, tuple[str, ...]] = {}
        self._prefixes: dict[Worker, list[ResidentPrefixes]] = {}
        self._leaving: set[Worker] = set()  # removed, with requests
        roster.name_prefix = self.name_prefix
        roster.stream_tokens = self.stream_tokens

    def name_prefix(self, worker: Worker, info: RequestInfo) -> None:
        """Name a request by its hashes, for all routers that read the journal."""
        name = name_of(info.prefix, info.prefix_bytes, info.bytes_before)
        for subscriber in self._subscribers.get(worker, ()):
            subscriber.name(info.id, name)

    def stream_tokens(self, worker: Worker, request_id: str, since: float) -> Sequence[int] | None:
        """Return the output tokens of a stream with one sequence, if they are known.

        `since`: when the worker got the request; infinite: only if it is running.
        """
        streams = []
        for subscriber in self._subscribers.get(worker, ()):
            subscriber.read_all()
            streams += subscriber.journal.streams(request_id, since)
        return streams[0].tokens if len(streams) == 1 and streams[0].complete else None

    def set_key(self, key: bytes | None) -> None:
        self._key = key
        for subscribers in self._subscribers.values():
            for subscriber in subscribers:
                subscriber.key = key

    def replicas_of(self, worker: Worker) -> list[EngineJournal]:
        return [subscriber.journal for subscriber in self._subscribers.get(worker, ())]

    def counts(self) -> Iterator[JournalCount]:
        for worker, subscribers in self._subscribers.items():
            yield JournalCount(
                worker.name,
                up=worker.reports_prefixes,
                gaps=sum(subscriber.journal.gaps for subscriber in subscribers),
                bad_signatures=sum(subscriber.bad_signatures for subscriber in subscribers),
                requests=sum(len(subscriber.journal.requests) for subscriber in subscribers),
            )

    async def run(self) -> None:
        """Read until cancelled."""
        try:
            while True:
                self.update(time.monotonic())
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            self.close()

    def update(self, now: float) -> None:
        """Follow changes of the workers, and ask silent engines for snapshots."""
        if self._roster.version != self._version or self._leaving - self._roster.leaving:
            self._version = self._roster.version
            self._follow_workers()
        self._roster.prefixes.drop_ended()
        for worker, subscribers in self._subscribers.items():
            for subscriber in subscribers:
                subscriber.check_silence(now)
            up = self._is_up(worker)
            if worker.reports_prefixes and not up:
                self._stop_claiming(worker)
            worker.reports_prefixes = up

    def close(self) -> None:
        for worker in [*self._endpoints]:
            self._remove(worker)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _is_up(self, worker: Worker) -> bool:
        subscribers = self._subscribers[worker]
        return len(subscribers) == len(self._endpoints[worker]) and all(s.up for s in subscribers)

    def _stop_claiming(self, worker: Worker) -> None:
        """Go on with expectations until the next snapshots."""
        for subscriber in self._subscribers[worker]:
            subscriber.journal.mark_incomplete()
        for prefixes in self._prefixes[worker]:
            prefixes.stop_claiming()

    def _follow_workers(self) -> None:
        wanted = {worker: worker.spec.journal for worker in self._roster if worker.spec.journal}
        # The journals of removed workers have the tokens of their last streams.
        leaving = self._roster.leaving & self._endpoints.keys()
        for worker in leaving:
            wanted[worker] = self._endpoints[worker]
        for worker in leaving - self._leaving:
            for prefixes in self._prefixes[worker]:
                prefixes.unfollow()
        self._leaving = leaving
        for worker, endpoints in [*self._endpoints.items()]:
            if wanted.get(worker) != endpoints:
                self._remove(worker)
        for worker, endpoints in wanted.items():
            if worker not in self._endpoints:
                self._endpoints[worker] = endpoints
                made = (self._subscribe(worker, endpoint) for endpoint in endpoints)
                subscribers = [subscriber for subscriber in made if subscriber is not None]
                self._subscribers[worker] = subscribers
                self._prefixes[worker] = self._follow_prefixes(worker, subscribers)

    def _follow_prefixes(
        self, worker: Worker, subscribers: list[JournalSubscriber]
    ) -> list[ResidentPrefixes]:
        index = self._roster.prefixes
        of_engines = [ResidentPrefixes(index, worker.index) for _ in subscribers]
        for subscriber, prefixes in zip(subscribers, of_engines, strict=True):
            prefixes.others = [other for other in of_engines if other is not prefixes]
            subscriber.journal.listener = prefixes
        return of_engines

    def _remove(self, worker: Worker) -> None:
        del self._endpoints[worker]
        worker.reports_prefixes = False
        for prefixes in self._prefixes.pop(worker):
            prefixes.unfollow()
        for subscriber in self._subscribers.pop(worker):
            subscriber.close()

    def _subscribe(self, worker: Worker, endpoint: str) -> JournalSubscriber | None:
        import zmq  # takes 3 MB, and most fleets have no journals

        from proxy.journal.subscriber import JournalSubscriber

        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        try:
            return JournalSubscriber(
                self._context, endpoint, worker.name, key=self._key, clock=time.monotonic
            )
        except zmq.ZMQError as error:
            logger.error("worker %s: the journal at %s: %s", worker.name, endpoint, error)
            return None

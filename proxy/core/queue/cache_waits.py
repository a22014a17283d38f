"""Requests that wait for a slot of the full worker that has their cache.

Other requests pass them. A wait ends when the worker has a slot, drains or fails, at a multiple of
what the cache saves, at half of the longest wait, or where another worker would miss the deadline
or target later. Then the request is in order with others.

Cost: one check per ticket and round of the queue.

How it fails: requests in other processes may take the slot.
"""

from __future__ import annotations

from proxy.core.fleet.leases import CacheWait
from proxy.core.fleet.worker import Worker
from proxy.core.queue.ticket import Ticket


class CacheWaits:
    """The tickets by worker."""

    def __init__(self) -> None:
        self.length = 0
        self.processes = 1  # with as many each
        self._tickets: dict[Worker, dict[Ticket, None]] = {}

    def count(self, worker: Worker) -> int:
        return self.processes * len(self._tickets.get(worker, ()))

    def add(self, ticket: Ticket, wait: CacheWait) -> None:
        self.length += 1
        self._tickets.setdefault(wait.worker, {})[ticket] = None

    def remove(self, ticket: Ticket, wait: CacheWait) -> None:
        self.length -= 1
        tickets = self._tickets[wait.worker]
        del tickets[ticket]
        if not tickets:
            del self._tickets[wait.worker]

    def ended(self, now: float) -> list[Ticket]:
        """Return the tickets that wait no longer."""
        return [
            ticket
            for worker, tickets in self._tickets.items()
            for ticket in tickets
            if now >= ticket.cache_until or not (worker.live and worker.full) or worker.barred
        ]

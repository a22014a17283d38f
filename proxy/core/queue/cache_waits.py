"""Requests that wait for a slot of the full worker that has their cache.

Other requests pass them. A wait ends when the worker has a slot, drains or fails, at a multiple of
what the cache saves, at half of the longest wait, or where another worker would miss the deadline
or target later. With requests of other processes only, of which one took a slot, it ends when the
slot was due. If the queue is full, the request goes to another worker. Then it is in order.

Cost: one check per ticket and round of the queue.
"""

from __future__ import annotations

from math import inf

from proxy.core.fleet.leases import CacheWait
from proxy.core.fleet.worker import Worker
from proxy.core.queue.ticket import Ticket


class CacheWaits:
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

    def placeable_elsewhere(self) -> list[list[Ticket]]:
        """Return each worker's tickets that others may serve in time, last first."""
        return [
            [
                t
                for t in reversed(tickets)
                if t.cache_wait is not None and not t.cache_wait.others_late
            ]
            for tickets in self._tickets.values()
        ]

    def next_slot_s(self, now: float) -> float:
        """Return when the first slot is due; inf if none."""
        tickets = (ticket for tickets in self._tickets.values() for ticket in tickets)
        return max(min((ticket.cache_due for ticket in tickets), default=inf) - now, 0.0)

    def pop_ended(self, now: float) -> list[Ticket]:
        ended: list[Ticket] = []
        for worker, tickets in self._tickets.items():
            at_once = not (worker.is_live and worker.is_full) or worker.is_barred
            remote = worker.remote_load
            frees_slots = worker.requests > remote.requests
            for ticket in tickets:
                wait = ticket.cache_wait
                overtaken = wait is not None and remote.total_placed > wait.placed_elsewhere
                if overtaken and not frees_slots and now >= ticket.cache_due:
                    ticket.cache_until = now
                if at_once or now >= ticket.cache_until:
                    ended.append(ticket)
        return ended

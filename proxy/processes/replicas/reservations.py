"""How many of a worker's slots this host may take before it hears from the other hosts.

Hosts decide at the same moments, without waiting for each other. Of the slots that were free when
all hosts last knew each other's charges, each may take an equal part, rounded up. So together they
exceed a worker's limit by less than one request per host. What a host has taken counts as known
once every other host has acknowledged it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.processes.replicas.remote_sheets import Member


class Reservations:
    """What this host has reported of workers with a request limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reported: deque[tuple[int, Mapping[str, int]]] = deque()  # update number, requests
        self._known: dict[str, int] = {}  # requests here that all other hosts know

    def report(self, number: int, requests: Mapping[str, int]) -> None:
        """Note the requests that an update reports."""
        self._reported.append((number, requests))

    def acknowledge(self, alive: list[Member]) -> None:
        """Take over what all other hosts have heard."""
        heard = min((member.heard.get(self._name, -1) for member in alive), default=None)
        while self._reported and (heard is None or self._reported[0][0] <= heard):
            self._known.update(self._reported.popleft()[1])

    def slots(self, worker: str, limit: int, remote: int, hosts: int) -> int:
        """Return how many of the free slots to leave to the other hosts."""
        free = max(limit - remote - self._known.get(worker, 0), 0)
        return free - -(-free // hosts)

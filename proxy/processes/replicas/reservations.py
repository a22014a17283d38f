"""How many of a worker's slots this host may take before it hears from the other hosts.

A host assumes the least number of its own requests that another may believe: the last that all
acknowledged, or one reported since. Of the slots that are free then, each may take an equal part,
rounded up. So they exceed a limit by less than one request per host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from sys import maxsize

from proxy.processes.replicas.remote_sheets import Member


class Reservations:
    """What this host has reported of workers with a request limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        # By update number; the first is the last that all other hosts have acknowledged.
        self._reported: deque[tuple[int, Mapping[str, int]]] = deque([(0, {})])

    def report(self, number: int, requests: Mapping[str, int]) -> bool:
        """Note the requests that an update reports; return whether they have changed."""
        if changed := requests != self._reported[-1][1]:
            self._reported.append((number, requests))
        return changed

    def acknowledge(self, alive: list[Member]) -> set[str]:
        """Drop what no other host believes any more; return the workers that this concerns."""
        reported, changed = self._reported, set()
        heard = min((member.heard.get(self._name, -1) for member in alive), default=maxsize)
        while len(reported) > 1 and reported[1][0] <= heard:
            _, before = reported.popleft()
            after = reported[0][1]
            changed |= {name for name, number in after.items() if before.get(name) != number}
        return changed

    def believed(self, worker: str) -> int:
        """Return the least number of requests that another host may believe."""
        return min(requests.get(worker, 0) for _, requests in self._reported)


def slots_for_others(limit: int, believed: int, remote: int, hosts: int) -> int:
    """Return how many of a worker's free slots to leave to the other hosts."""
    free = max(limit - remote - believed, 0)
    # Requests above what is believed take from this host's part.
    return free - -(-free // hosts)

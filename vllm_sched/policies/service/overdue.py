"""Turns of requests that have waited for the maximum time of their lane."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_sched.policies.service.running import RunningLanes
from vllm_sched.policies.types import RequestView


class OverdueTurns:
    """At most one released request per lane: the next one waits until it has ended."""

    def __init__(self, max_wait_s: Mapping[str, float], running: RunningLanes) -> None:
        self.released: dict[str, str] = {}  # the released request of each lane
        self.releases = 0
        self._max_wait_s = max_wait_s
        self._running = running
        # Fronts of the current step that go first; False if they were released before.
        self._due: dict[str, bool] = {}

    def begin_step(self) -> None:
        self._due.clear()

    def is_due(self, lane: str, head: RequestView, waited: float) -> bool:
        name, released = head.request_id, self.released.get(lane)
        self._due.pop(name, None)
        if released in self._running.requests:
            return False
        # The released request was preempted and is back, or later ones precede it.
        is_back = released is not None and (released == name or head.num_preemptions > 0)
        if is_back or waited >= self._max_wait_s[lane]:
            self._due[name] = not is_back
        return name in self._due

    def is_new(self, name: str) -> bool:
        """Return whether the head goes first, and was not released before."""
        return self._due.get(name, False)

    def pop(self, name: str) -> bool | None:
        """Forget a head; return `is_new`, or None if it does not go first."""
        return self._due.pop(name, None)

    def release(self, lane: str, name: str) -> None:
        self.released[lane] = name
        self.releases += 1

    def record_departure(self, lane: str, name: str) -> bool:
        """Return whether the request was released."""
        if was_released := self.released.get(lane) == name:
            del self.released[lane]
        return was_released

"""Turns of requests that have waited for the maximum time of their lane."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_sched.policies.service_classes.running import RunningLanes
from vllm_sched.policies.types import RequestView


class OverdueTurns:
    """At most one released request per lane: the next one waits until it has ended."""

    def __init__(self, max_wait_s: Mapping[str, float], running: RunningLanes) -> None:
        self.released: dict[str, str] = {}  # the released request of each lane
        self.releases = 0
        self._max_wait_s = max_wait_s
        self._running = running
        # Heads that go first in this step; False if they were released before.
        self._first_heads: dict[str, bool] = {}

    def begin_step(self) -> None:
        self._first_heads.clear()

    def check_head(self, lane: str, head: RequestView, waited: float) -> bool:
        """Note and return whether the head goes before all lanes."""
        request_id, released = head.request_id, self.released.get(lane)
        self._first_heads.pop(request_id, None)
        if released in self._running.requests:
            return False
        # The released request was preempted and is back, or later ones precede it.
        is_back = released is not None and (released == request_id or head.num_preemptions > 0)
        if is_back or waited >= self._max_wait_s[lane]:
            self._first_heads[request_id] = not is_back
        return request_id in self._first_heads

    def goes_first(self, request_id: str) -> bool:
        return request_id in self._first_heads

    def will_be_released(self, request_id: str) -> bool:
        return self._first_heads.get(request_id, False)

    def record_admission(self, lane: str, request_id: str) -> bool:
        """Note that a head went first; return whether this released it."""
        if is_new := self._first_heads.pop(request_id):
            self.released[lane] = request_id
            self.releases += 1
        return is_new

    def record_departure(self, lane: str, request_id: str) -> bool:
        """Return whether the request was released."""
        if was_released := self.released.get(lane) == request_id:
            del self.released[lane]
        return was_released

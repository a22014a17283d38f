"""A batch under way."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from proxy.batches.types import Batch, LineJob

if TYPE_CHECKING:
    from proxy.batches.line_request import LineRequest

REST_S, LONGEST_REST_S = 1.0, 60.0  # after a line came back


class BatchProgress:
    """What the lane knows of a batch beyond the store."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.ready: deque[LineJob] = deque()
        self.last = 0  # the line read last
        self.read_all = False
        self.errands: set[LineRequest] = set()
        self.tries: dict[int, int] = {}  # by line, of those that failed
        self.turn = 0  # when it had one last
        self.rest_until = -inf
        self.unsaved = 0
        self.held = ""  # why none of it is begun now, whatever gaps there are
        self._rest_s = REST_S

    def rest(self, now: float, asked_s: float) -> None:
        """Send nothing for a while; longer each time, and those under way count once."""
        if now >= self.rest_until:
            self.rest_until = now + min(max(asked_s, self._rest_s), LONGEST_REST_S)
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)

    def went_well(self, number: int) -> None:
        """Forget what went wrong before."""
        self.tries.pop(number, None)
        self._rest_s = REST_S

    def failed(self, number: int) -> int:
        """Count a failure of a line; returns how many there were."""
        tries = self.tries[number] = self.tries.get(number, 0) + 1
        return tries

    def drop(self, now: float) -> None:
        """Let go of all lines that are on their way."""
        for errand in list(self.errands):  # one that is dropped may let another go
            errand.drop(now)

    @property
    def over(self) -> bool:
        """Whether each line has a result that is kept."""
        return self.read_all and not (self.ready or self.errands or self.unsaved)

"""Progress of one batch in the scheduler."""

from __future__ import annotations

from collections import deque
from math import inf

from proxy.batches.line_request import LineRequest
from proxy.batches.types import Batch, LineJob

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # pause after a line was refused


class BatchProgress:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.ready: deque[LineJob] = deque()
        self.last_read = 0  # number of the last line read
        self.read_all = False
        self.requests: set[LineRequest] = set()
        self.tries: dict[int, int] = {}  # failed attempts by line number
        self.active_at = -inf  # when lines were last read or sent
        self.turn = 0  # sequence number of the batch's last turn
        self.paused_until = -inf
        self.unsaved = 0
        self.why_held = ""  # why no line is sent; empty if lines may be
        self._pause_s = MIN_PAUSE_S

    def pause(self, now: float, retry_after_s: float) -> None:
        """Pause the batch; pauses grow, and lines that fail during one pause count once."""
        if now >= self.paused_until:
            self.paused_until = now + min(max(retry_after_s, self._pause_s), MAX_PAUSE_S)
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def line_succeeded(self, number: int) -> None:
        """Reset a line's failure count and the batch's pause."""
        self.tries.pop(number, None)
        self._pause_s = MIN_PAUSE_S

    def line_failed(self, number: int) -> int:
        """Count a failed attempt; return the line's failures."""
        tries = self.tries[number] = self.tries.get(number, 0) + 1
        return tries

    @property
    def unfinished_jobs(self) -> list[LineJob]:
        """The lines read that have no result."""
        return [*self.ready, *(request.job for request in self.requests)]

    def pop_idle(self, *, everything: bool) -> list[LineJob]:
        """Return and forget unsent lines, except lines that failed once."""
        idle = [job for job in self.ready if everything or job.number not in self.tries]
        self.ready = deque(job for job in self.ready if job not in idle)
        return idle

    def cancel_requests(self, now: float) -> None:
        for request in list(self.requests):  # a cancelled line may remove another from the set
            request.cancel(now)

    @property
    def is_done(self) -> bool:
        """True if every line has a saved result."""
        return self.read_all and not (self.ready or self.requests or self.unsaved)

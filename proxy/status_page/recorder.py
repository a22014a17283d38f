"""Records the requests of one process while the status page is open.

It records at most one token time per 20 ms of a request, up to a limit. Each update hands the
records over. A process that is not asked for updates stops recording.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from proxy.core.model.types import Reason
from proxy.metrics.observed import ObservedRequest
from proxy.metrics.recent import text
from proxy.metrics.registry import Metrics, class_of
from proxy.status_page.snapshot import LiveCounts

WINDOW_S = 60.0
MIN_TICK_INTERVAL_S = 0.02  # the page draws one pixel per 50 ms
MAX_TICKS = 16  # token times of a request per beat
MAX_ROWS = 2000  # new rows per beat
MAX_ENDED = 6000  # ended requests that are kept
STOP_AFTER_S = 5.0
MAX_TEXT = 80
NO_POOL = "none"

FIELDS = (
    "n", "id", "model", "size", "pool", "worker", "prefill", "reason", "status",
    "prompt_tokens", "tokens", "arrived", "placed", "prefilled", "first", "ended",
)  # fmt: skip
Row = list[Any]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """What an update contains: the zero of its times, the whole minute, figures."""

    zero: float
    last_minute: bool
    figures: bool


@dataclass(frozen=True, slots=True)
class LiveUpdate:
    source: str  # the process; new after a restart
    number: int  # a gap means lost data
    rows: list[Row]  # new and changed rows
    ticks: list[list[int]]  # row numbers, each with its token times
    dropped: int  # rows left out because of limits
    last_minute: list[Row] | None  # rows of the last minute, if requested
    figures: LiveCounts | None


class LiveRecorder:
    def __init__(
        self,
        metrics: Metrics,
        figures: Callable[[float], LiveCounts | None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        # The row numbers of processes must differ.
        self.process_index, self.num_processes = 0, 1
        self._metrics = metrics
        self._figures = figures
        self._clock = clock
        self._wall = wall
        self._zero = clock()  # zero of all times
        self._last_update_at = -inf
        self._recording_since = 0.0
        self._numbers = 0
        self._ended: list[tuple[Row, list[int]]] = []  # ended since the last update
        self._rows: deque[Row] = deque(maxlen=MAX_ENDED)  # requests that ended while recording
        self._reported: dict[int, tuple[object, ...]] = {}  # of requests in flight, by number
        self._dropped = 0
        self._source = os.urandom(4).hex()
        self._parts = 0

    # Called by the data path while recording

    def record_tokens(self, seen: ObservedRequest, now: float) -> None:
        ticks = seen.ticks
        if ticks is None:
            seen.ticks = [now]
        elif not ticks or (now - ticks[-1] >= MIN_TICK_INTERVAL_S and len(ticks) < MAX_TICKS):
            ticks.append(now)

    def record_end(self, seen: ObservedRequest, now: float, status: int, reason: Reason) -> None:
        """Record the end of a request; a reported request's end is never left out."""
        reported = self._reported.pop(seen.number, None)
        if reported is None and len(self._ended) >= MAX_ROWS:
            self._dropped += 1
            return
        row = self._row(seen, status=status, reason=reason.value, ended=now)
        self._ended.append((row, self._ticks(seen)))
        self._rows.append(row)

    # Called by the viewers' side

    def start(self, now: float) -> None:
        self._recording_since = now
        self._metrics.live = self

    def end(self) -> None:
        self._metrics.live = None
        self._reported.clear()
        self._ended.clear()
        self._rows.clear()

    def update(self, now: float, update_request: UpdateRequest) -> LiveUpdate:
        """Return this process's update; recording starts if it is off."""
        if update_request.zero != self._zero:
            self._zero = update_request.zero
            self._rows.clear()
            self._ended.clear()
        if self._metrics.live is None:
            self.start(now)
            asyncio.get_running_loop().call_later(STOP_AFTER_S, self._stop_if_unused)
        self._last_update_at = now
        rows, ticks = self._changes()
        dropped, self._dropped = self._dropped, 0
        last_minute = self._rows_of_last_minute(now) if update_request.last_minute else None
        figures = self._figures(now) if update_request.figures else None
        self._parts += 1
        return LiveUpdate(self._source, self._parts, rows, ticks, dropped, last_minute, figures)

    def _stop_if_unused(self) -> None:
        if self._metrics.live is None:
            return
        if self._clock() - self._last_update_at >= STOP_AFTER_S:
            self.end()
        else:
            asyncio.get_running_loop().call_later(STOP_AFTER_S, self._stop_if_unused)

    def _changes(self) -> tuple[list[Row], list[list[int]]]:
        rows: list[Row] = []
        ticks: list[list[int]] = []
        ended, self._ended = self._ended, []
        for row, passed in ended:
            rows.append(row)
            if passed:
                ticks.append([row[0], *passed])
        for seen in self._metrics.under_way():
            key = (seen.decision, seen.placed_at, seen.prefilled_at, seen.first_token_at)
            if seen.number == 0 or self._reported.get(seen.number) != key:
                if len(rows) >= MAX_ROWS:
                    continue  # reported by a later update, or counted as dropped when it ends
                rows.append(self._row(seen))
                self._reported[seen.number] = key
            if passed := self._ticks(seen):
                ticks.append([seen.number, *passed])
        return rows, ticks

    def _rows_of_last_minute(self, now: float) -> list[Row]:
        since = now - WINDOW_S
        while self._rows and self._rows[0][-1] < self.ms(since):
            self._rows.popleft()
        seen = [request for request in self._metrics.under_way() if request.number]
        under_way = [self._row(request) for request in seen]
        return [*self._before(now), *self._rows, *under_way]

    def _before(self, now: float) -> Iterator[Row]:
        wall = self._wall()
        roles = {worker.name: worker.role.value for worker in self._metrics.router.fleet.roster}
        number = 0
        for entry in self._metrics.recent.newest(MAX_ENDED):
            ended = now - (wall - entry.time)
            if ended > self._recording_since:
                continue
            if ended < now - WINDOW_S:
                return
            number -= 1
            arrived = ended - entry.duration_s
            pool = NO_POOL if entry.worker is None else roles.get(entry.worker, NO_POOL)
            placed = None if entry.worker is None else self.ms(arrived + entry.queue_s)
            first = None if entry.ttft_s is None else self.ms(arrived + entry.ttft_s)
            yield [
                number * self.num_processes - self.process_index, text(entry.id, MAX_TEXT),
                text(entry.model, MAX_TEXT), entry.size,
                "handover" if entry.prefill_worker else pool, entry.worker, entry.prefill_worker,
                entry.reason.value, entry.status, entry.prompt_tokens, None, self.ms(arrived),
                placed, None, first, self.ms(ended),
            ]  # fmt: skip

    def _row(
        self,
        seen: ObservedRequest,
        *,
        status: int | None = None,
        reason: str | None = None,
        ended: float | None = None,
    ) -> Row:
        if seen.number == 0:
            self._numbers += 1
            seen.number = self._numbers * self.num_processes + self.process_index
        info, decision = seen.info, seen.decision
        pool, worker, prefill = NO_POOL, None, None
        if decision is not None:
            pool, worker = decision.worker.role.value, decision.worker.name
            reason = reason or decision.reason.value
            if decision.handover is not None:
                pool, prefill = "handover", decision.handover.prefill.name
        first = seen.first_token_at
        # Placement after a retry is later; the first placement ended the queue time.
        placed = None if seen.placed_at is None else seen.started + seen.queue_s
        return [
            seen.number,
            text(seen.id, MAX_TEXT),
            "" if info is None else text(info.model, MAX_TEXT),
            class_of(info),
            pool, worker, prefill, reason, status,
            None if info is None else info.prompt_tokens,
            None if first is None else seen.output_tokens,
            self.ms(seen.started), self.ms(placed), self.ms(seen.prefilled_at),
            self.ms(first), self.ms(ended),
        ]  # fmt: skip

    def _ticks(self, seen: ObservedRequest) -> list[int]:
        ticks = seen.ticks
        if not ticks:
            return []
        times = [round((tick - self._zero) * 1000) for tick in ticks]
        ticks.clear()
        return times

    def ms(self, at: float | None) -> int | None:
        return None if at is None else round((at - self._zero) * 1000)

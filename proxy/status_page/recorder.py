"""What one process notes of its requests while somebody looks at the status page.

Then each token's time is noted, at most one for each 20 ms of a request, and so many in all; what
was noted is given away whenever it is asked for. A process that has not been asked for a while
notes nothing any more.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from proxy.metrics.registry import class_of

if TYPE_CHECKING:
    from proxy.core.model.types import Reason
    from proxy.metrics.observed import ObservedRequest
    from proxy.metrics.registry import Metrics
    from proxy.status_page.snapshot import LiveCounts

WINDOW_S = 60.0
TICK_S = 0.02  # a pixel of the picture is 50 ms
MOST_TICKS = 16  # of a request in a beat; a late beat gets no more
MOST_ROWS = 2000  # new in a beat
KEPT = 6000  # of those that ended
FORGET_S = 5.0
MAX_TEXT = 80
NO_POOL = "none"

FIELDS = (
    "n", "id", "model", "size", "pool", "worker", "prefill", "reason", "status",
    "prompt_tokens", "tokens", "arrived", "placed", "prefilled", "first", "ended",
)  # fmt: skip
Row = list[Any]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """What is asked of a process: times counted from where, and whether the whole minute."""

    zero: float
    whole: bool
    figures: bool


@dataclass(frozen=True, slots=True)
class LiveUpdate:
    """What one process tells."""

    source: str  # who tells; a process that was begun anew is another
    number: int  # of its parts; where one is missing, so is what was in it
    rows: list[Row]  # new and changed ones
    ticks: list[list[int]]  # a row's number and when tokens passed
    dropped: int  # rows that were too many
    whole: list[Row] | None  # of the last minute, if it was wanted
    figures: LiveCounts | None


class LiveRecorder:
    """One process's."""

    def __init__(
        self,
        metrics: Metrics,
        figures: Callable[[float], LiveCounts | None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        # Of several processes which one this is, and how many there are.
        self.mark, self.marks = 0, 1
        self._metrics = metrics
        self._figures = figures
        self._clock = clock
        self._wall = wall
        self._zero = clock()  # what times are counted from
        self._asked_at = -inf
        self._looked_since = 0.0
        self._numbers = 0
        self._ended: list[tuple[Row, list[int]]] = []  # since they were asked for last
        self._rows: deque[Row] = deque(maxlen=KEPT)  # of those that ended while this was on
        self._known: dict[int, tuple[object, ...]] = {}  # what was told of those under way
        self._dropped = 0
        self._source = os.urandom(4).hex()
        self._parts = 0

    # For the data path, while somebody looks

    def saw_tokens(self, seen: ObservedRequest, now: float) -> None:
        """Note that tokens passed."""
        ticks = seen.ticks
        if ticks is None:
            seen.ticks = [now]
        elif not ticks or (now - ticks[-1] >= TICK_S and len(ticks) < MOST_TICKS):
            ticks.append(now)

    def ended(self, seen: ObservedRequest, now: float, status: int, reason: Reason) -> None:
        """Note the end of a request; of one that was told of it is told whatever happens."""
        told = self._known.pop(seen.number, None)
        if told is None and len(self._ended) >= MOST_ROWS:
            self._dropped += 1
            return
        row = self._row(seen, status, reason.value, now)
        self._ended.append((row, self._ticks(seen)))
        self._rows.append(row)

    # For whoever asks

    def begin(self, now: float) -> None:
        """Note what passes, from now on."""
        self._looked_since = now
        self._metrics.live = self

    def end(self) -> None:
        """Note nothing any more."""
        self._metrics.live = None
        self._known.clear()
        self._ended.clear()
        self._rows.clear()

    def part(self, now: float, wanted: UpdateRequest) -> LiveUpdate:
        """Tell what is new in this process; it notes what passes until nobody asks any more."""
        if wanted.zero != self._zero:
            self._zero = wanted.zero
            self._rows.clear()
            self._ended.clear()
        if self._metrics.live is None:
            self.begin(now)
            asyncio.get_running_loop().call_later(FORGET_S, self._forget)
        self._asked_at = now
        rows, ticks = self._changes()
        dropped, self._dropped = self._dropped, 0
        whole = self._whole(now) if wanted.whole else None
        figures = self._figures(now) if wanted.figures else None
        self._parts += 1
        return LiveUpdate(self._source, self._parts, rows, ticks, dropped, whole, figures)

    def _forget(self) -> None:
        if self._metrics.live is None:
            return
        if self._clock() - self._asked_at >= FORGET_S:
            self.end()
        else:
            asyncio.get_running_loop().call_later(FORGET_S, self._forget)

    def _changes(self) -> tuple[list[Row], list[list[int]]]:
        """Collect rows that are new or changed, and the tokens that passed."""
        rows: list[Row] = []
        ticks: list[list[int]] = []
        ended, self._ended = self._ended, []
        for row, passed in ended:
            rows.append(row)
            if passed:
                ticks.append([row[0], *passed])
        for seen in self._metrics.under_way():
            key = (seen.decision, seen.placed_at, seen.prefilled_at, seen.first_token_at)
            if seen.number == 0 or self._known.get(seen.number) != key:
                if len(rows) >= MOST_ROWS:
                    continue  # it is told of with the next, or counted as it ends
                rows.append(self._row(seen, None, None, None))
                self._known[seen.number] = key
            if passed := self._ticks(seen):
                ticks.append([seen.number, *passed])
        return rows, ticks

    def _whole(self, now: float) -> list[Row]:
        """Return all that is known of the last minute."""
        since = now - WINDOW_S
        while self._rows and self._rows[0][-1] < self.ms(since):
            self._rows.popleft()
        seen = [each for each in self._metrics.under_way() if each.number]
        under_way = [self._row(each, None, None, None) for each in seen]
        return [*self._before(now), *self._rows, *under_way]

    def _before(self, now: float) -> Iterator[Row]:
        """List what ended before anybody looked, as far as it is remembered."""
        wall = self._wall()
        roles = {worker.name: worker.role.value for worker in self._metrics.router.fleet}
        number = 0
        for entry in self._metrics.recent.newest(KEPT):
            ended = now - (wall - entry.time)
            if ended > self._looked_since:
                continue
            if ended < now - WINDOW_S:
                return
            number -= 1
            arrived = ended - entry.duration_s
            pool = NO_POOL if entry.worker is None else roles.get(entry.worker, NO_POOL)
            placed = None if entry.worker is None else self.ms(arrived + entry.queue_s)
            first = None if entry.ttft_s is None else self.ms(arrived + entry.ttft_s)
            yield [
                number * self.marks - self.mark, text(entry.id), text(entry.model),
                entry.size,
                "handover" if entry.prefill_worker else pool, entry.worker, entry.prefill_worker,
                entry.reason.value, entry.status, entry.prompt_tokens, None, self.ms(arrived),
                placed, None, first, self.ms(ended),
            ]  # fmt: skip

    def _row(
        self, seen: ObservedRequest, status: int | None, reason: str | None, ended: float | None
    ) -> Row:
        if seen.number == 0:
            self._numbers += 1
            seen.number = self._numbers * self.marks + self.mark
        ask, decision = seen.ask, seen.decision
        pool, worker, prefill = NO_POOL, None, None
        if decision is not None:
            pool, worker = decision.worker.role.value, decision.worker.name
            reason = reason or decision.reason.value
            if decision.handover is not None:
                pool, prefill = "handover", decision.handover.prefill.name
        first = seen.first_token_at
        # With a worker that failed it was placed already, and waited no more.
        placed = None if seen.placed_at is None else seen.started + seen.queue_s
        return [
            seen.number,
            text(seen.id),
            "" if ask is None else text(ask.model),
            class_of(ask),
            pool, worker, prefill, reason, status,
            None if ask is None else ask.prompt_tokens,
            None if first is None else seen.opening + seen.tokens,
            self.ms(seen.started), self.ms(placed), self.ms(seen.prefilled_at),
            self.ms(first), self.ms(ended),
        ]  # fmt: skip

    def _ticks(self, seen: ObservedRequest) -> list[int]:
        ticks = seen.ticks
        if not ticks:
            return []
        told = [round((each - self._zero) * 1000) for each in ticks]
        ticks.clear()
        return told

    def ms(self, at: float | None) -> int | None:
        """Count milliseconds since this was made: what all times of the page are in."""
        return None if at is None else round((at - self._zero) * 1000)


def text(value: str) -> str:
    """Cut what a client chose, and replace what is no text."""
    return value[:MAX_TEXT].encode(errors="replace").decode()

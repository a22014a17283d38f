"""The last minute of requests, for whoever looks at the status page.

Only while somebody looks: then each token's time is noted (at most one for each 20 ms of a
request), and four times a second what has changed is written once and given to all viewers. A
viewer that does not keep up misses what comes meanwhile and is told everything anew; one that takes
nothing for long is let go. So nothing piles up, here or there.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from proxy.core.types import Reason

if TYPE_CHECKING:
    from proxy.control.metrics import Metrics
    from proxy.control.trace import Trace
    from proxy.core.types import Ask, Decision

BEAT_S = 0.25
STATE_EVERY = 4  # beats
WINDOW_S = 60.0
TICK_S = 0.02  # a pixel of the picture is 50 ms
MOST_TICKS = 16  # of a request in a beat; a late beat gets no more
MOST_ROWS = 2000  # new in a beat
KEPT = 6000  # of those that ended
MOST_VIEWERS = 8
PATIENCE_S = 20.0
MAX_TEXT = 80
NO_POOL = "none"
ALIVE = b": \n\n"

FIELDS = (
    "n", "id", "model", "size", "pool", "worker", "prefill", "reason", "status",
    "prompt_tokens", "tokens", "arrived", "placed", "prefilled", "first", "ended",
)  # fmt: skip
Row = list[Any]


class Seen(Protocol):
    """A request as the data path keeps it."""

    ask: Ask | None
    decision: Decision | None
    prompt: bytes
    started: float
    queue_s: float
    sent_bytes: int
    placed_at: float | None
    prefilled_at: float | None
    first_token_at: float | None
    tokens: int
    number: int
    ticks: list[float] | None

    @property
    def id(self) -> str:
        """The client's name for it, or else ours."""

    @property
    def trace(self) -> Trace | None:
        """Its own part of that trace, where requests are traced."""

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to, if any."""


class Viewer:
    """One page that is open."""

    def __init__(self) -> None:
        self.ended = False
        self.behind = True  # and needs everything
        self.taken_at = 0.0
        self._slot: bytes | None = None
        self._filled = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether it has yet to take what it was given last."""
        return self._slot is not None

    def give(self, message: bytes) -> None:
        """Put something before it."""
        self._slot = message
        self._filled.set()

    async def take(self) -> bytes | None:
        """Wait for something; None if this is the end."""
        await self._filled.wait()
        self._filled.clear()
        message, self._slot = self._slot, None
        return None if self.ended else message

    def end(self) -> None:
        """Let it go."""
        self.ended = True
        self._filled.set()


class Live:
    """What is shown of the last minute."""

    def __init__(
        self,
        metrics: Metrics,
        state: Callable[[float], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._state = state
        self._clock = clock
        self._wall = wall
        self._zero = clock()
        self._run_id = os.urandom(4).hex()
        self._viewers: set[Viewer] = set()
        self._numbers = 0
        self._beats = 0
        self._ended: list[tuple[Row, list[int]]] = []  # since the last beat
        self._rows: deque[Row] = deque(maxlen=KEPT)  # of those that ended while watched
        self._looked_since = 0.0
        self._known: dict[int, tuple[object, ...]] = {}  # what was told of those under way
        self._dropped = 0  # rows that were too many
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether anybody looks."""
        return bool(self._viewers)

    # For the data path, while somebody looks

    def saw_tokens(self, seen: Seen, now: float) -> None:
        """Note that tokens passed."""
        ticks = seen.ticks
        if ticks is None:
            seen.ticks = [now]
        elif not ticks or (now - ticks[-1] >= TICK_S and len(ticks) < MOST_TICKS):
            ticks.append(now)

    def ended(self, seen: Seen, now: float, status: int, reason: Reason) -> None:
        """Note the end of a request."""
        if len(self._ended) >= MOST_ROWS:
            self._dropped += 1
            return
        row = self._row(seen, status, reason.value, now)
        self._known.pop(seen.number, None)
        self._ended.append((row, self._ticks(seen)))
        self._rows.append(row)

    # For viewers

    def join(self) -> Viewer | None:
        """Open a page; None if too many are open."""
        if len(self._viewers) >= MOST_VIEWERS or self._closed:
            return None
        viewer = Viewer()
        viewer.taken_at = self._clock()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._looked_since = self._clock()
            self._metrics.live = self
            self._task = asyncio.get_running_loop().create_task(self._run(), name="live")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Close a page."""
        viewer.end()
        self._viewers.discard(viewer)

    def close(self) -> None:
        """End all pages; they will try again by themselves."""
        self._closed = True
        for viewer in list(self._viewers):
            self.leave(viewer)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._viewers:
                self.beat()
                await asyncio.sleep(BEAT_S)
        finally:
            self._metrics.live = None
            self._known.clear()
            self._ended.clear()
            self._rows.clear()

    def beat(self) -> None:
        """Tell every viewer what is new."""
        now = self._clock()
        whole_state = self._beats % STATE_EVERY == 0
        self._beats += 1
        rows, ticks = self._changes()
        news: dict[str, Any] = {"now": self._ms(now), "rows": rows, "ticks": ticks}
        if self._dropped:
            news["dropped"], self._dropped = self._dropped, 0
        if whole_state:
            news["state"] = self._state(now)
        message = event("news", news)
        everything: bytes | None = None
        for viewer in list(self._viewers):
            if viewer.busy:
                viewer.behind = True
                if now - viewer.taken_at > PATIENCE_S:
                    self.leave(viewer)
                continue
            viewer.taken_at = now
            if viewer.behind:
                everything = everything or self._everything(now)
                viewer.behind = False
                viewer.give(everything)
            else:
                viewer.give(message)

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
                    self._dropped += 1
                    continue
                rows.append(self._row(seen, None, None, None))
                self._known[seen.number] = key
            if passed := self._ticks(seen):
                ticks.append([seen.number, *passed])
        return rows, ticks

    def _everything(self, now: float) -> bytes:
        """Write all that is known of the last minute."""
        since = now - WINDOW_S
        while self._rows and self._rows[0][-1] < self._ms(since):
            self._rows.popleft()
        under_way = [
            self._row(seen, None, None, None) for seen in self._metrics.under_way() if seen.number
        ]
        told = {
            "run": self._run_id,
            "fields": FIELDS,
            "window": self._ms(self._zero + WINDOW_S),
            "now": self._ms(now),
            "rows": [*self._before(now), *self._rows, *under_way],
            "ticks": [],
            "state": self._state(now),
        }
        return event("all", told)

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
            placed = None if entry.worker is None else self._ms(arrived + entry.queue_s)
            first = None if entry.ttft_s is None else self._ms(arrived + entry.ttft_s)
            yield [
                number, text(entry.id), text(entry.model), "long" if entry.long else "short",
                "handover" if entry.prefill_worker else pool, entry.worker, entry.prefill_worker,
                entry.reason.value, entry.status, entry.prompt_tokens, None, self._ms(arrived),
                placed, None, first, self._ms(ended),
            ]  # fmt: skip

    def _row(self, seen: Seen, status: int | None, reason: str | None, ended: float | None) -> Row:
        if seen.number == 0:
            self._numbers += 1
            seen.number = self._numbers
        ask, decision = seen.ask, seen.decision
        pool, worker, prefill = NO_POOL, None, None
        if decision is not None:
            pool, worker = decision.worker.role.value, decision.worker.name
            reason = reason or decision.reason.value
            if decision.handover is not None:
                pool, prefill = "handover", decision.handover.prefill.name
        first = seen.first_token_at
        return [
            seen.number,
            text(seen.id),
            "" if ask is None else text(ask.model),
            "long" if ask is not None and ask.long else "short",
            pool, worker, prefill, reason, status,
            None if ask is None else ask.prompt_tokens,
            None if first is None else seen.tokens + 1,
            self._ms(seen.started), self._ms(seen.placed_at), self._ms(seen.prefilled_at),
            self._ms(first), self._ms(ended),
        ]  # fmt: skip

    def _ticks(self, seen: Seen) -> list[int]:
        ticks = seen.ticks
        if not ticks:
            return []
        told = [round((each - self._zero) * 1000) for each in ticks]
        ticks.clear()
        return told

    def _ms(self, at: float | None) -> int | None:
        """Count milliseconds since this was made: what all times of the page are in."""
        return None if at is None else round((at - self._zero) * 1000)


def event(name: str, data: object) -> bytes:
    """Write a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def text(value: str) -> str:
    """Cut what a client chose, and replace what is no text."""
    return value[:MAX_TEXT].encode(errors="replace").decode()

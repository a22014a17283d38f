"""The status page's viewers, and what they are told four times a second.

What has changed is written once and given to all. A viewer that does not keep up misses what comes
meanwhile and is told everything anew; one that takes nothing for long is let go. So nothing piles
up, here or there. Where several processes serve, the one that leads has the viewers, and asks each
for its part. Where a part is missing, or a process is gone or was begun anew, what was told of its
requests may never end: then all are told everything anew too.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

import orjson

from proxy.status_page.recorder import FIELDS, LiveRecorder, LiveUpdate, UpdateRequest

if TYPE_CHECKING:
    from proxy.metrics.registry import Metrics
    from proxy.status_page.snapshot import LiveCounts, LiveState

BEAT_S = 0.25
STATE_EVERY = 4  # beats
MOST_VIEWERS = 8
PATIENCE_S = 20.0
AGAIN_S = 1.0


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


class LiveView:
    """What is shown of the last minute, and to whom."""

    def __init__(
        self,
        metrics: Metrics,
        state: LiveState,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.notes = LiveRecorder(metrics, state.figures, clock, wall)
        # Where several processes serve: asks them all for their parts.
        self.ask_all: Callable[[UpdateRequest], Awaitable[list[LiveUpdate]]] | None = None
        self._state = state
        self._clock = clock
        self._zero = clock()
        self._run_id = os.urandom(4).hex()
        self._viewers: set[Viewer] = set()
        self._heard: dict[str, int] = {}  # the last part of each process
        self._told_again_at = -inf
        self._beats = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether anybody looks."""
        return bool(self._viewers)

    def join(self) -> Viewer | None:
        """Open a page; None if too many are open."""
        if len(self._viewers) >= MOST_VIEWERS or self._closed:
            return None
        viewer = Viewer()
        viewer.taken_at = self._clock()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self.notes.begin(self._clock())
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
                await self.beat()
                await asyncio.sleep(BEAT_S)
        finally:
            self.notes.end()

    async def beat(self) -> None:
        """Tell every viewer what is new."""
        now = self._clock()
        whole = any(viewer.behind and not viewer.busy for viewer in self._viewers)
        wanted = UpdateRequest(self._zero, whole, self._beats % STATE_EVERY == 0 or whole)
        self._beats += 1
        self._tell(now, await self._parts(now, wanted))

    async def _parts(self, now: float, wanted: UpdateRequest) -> list[LiveUpdate]:
        if self.ask_all is not None:
            with suppress(TimeoutError):  # then at least our own
                return await self.ask_all(wanted)
        return [self.notes.part(now, wanted)]

    def _see_gaps(self, now: float, parts: list[LiveUpdate]) -> None:
        """Have everything told anew where something can't have been told, but not all the time."""
        heard = {part.source: part.number for part in parts}
        if heard == {source: number + 1 for source, number in self._heard.items()}:
            self._heard = heard
        elif now >= self._told_again_at + AGAIN_S:
            self._heard, self._told_again_at = heard, now
            for viewer in self._viewers:
                viewer.behind = True
        # Else what was heard of stays as it was: a gap is still one the next time.

    def _tell(self, now: float, parts: list[LiveUpdate]) -> None:
        self._see_gaps(now, parts)
        news: dict[str, Any] = {
            "now": round((now - self._zero) * 1000),
            "rows": [row for part in parts for row in part.rows],
            "ticks": [tick for part in parts for tick in part.ticks],
            "dropped": sum(part.dropped for part in parts),
        }
        figures = [part.figures for part in parts if part.figures is not None]
        if figures:
            news["state"] = self._state(now, figures)
        message = event("news", news)
        everything: bytes | None = None
        for viewer in list(self._viewers):
            if viewer.busy:
                viewer.behind = True
                if now - viewer.taken_at > PATIENCE_S:
                    self.leave(viewer)
                continue
            viewer.taken_at = now
            if not viewer.behind:
                viewer.give(message)
            elif all(part.whole is not None for part in parts):
                everything = everything or self._everything(now, parts, figures)
                viewer.behind = False
                viewer.give(everything)

    def _everything(self, now: float, parts: list[LiveUpdate], figures: list[LiveCounts]) -> bytes:
        told = {
            "run": self._run_id,
            "fields": FIELDS,
            "now": round((now - self._zero) * 1000),
            "rows": [row for part in parts for row in part.whole or ()],
            "ticks": [],
            "state": self._state(now, figures),
        }
        return event("all", told)


def event(name: str, data: object) -> bytes:
    """Write a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))

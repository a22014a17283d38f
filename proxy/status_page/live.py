"""Viewers of the status page, which get an update four times a second.

Each update is encoded once. A slow viewer misses updates and then gets the full state; one that
reads nothing for long is disconnected. So no data piles up.

With several processes the leader has the viewers and asks every process for its part. If a part is
missing or a process restarted, ends of requests may be lost, so all viewers get the full state.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import Any

import orjson

from proxy.metrics.registry import Metrics
from proxy.status_page.recorder import FIELDS, LiveRecorder, LiveUpdate, UpdateRequest
from proxy.status_page.snapshot import LiveCounts, LiveState

BEAT_INTERVAL_S = 0.25
STATE_EVERY_BEATS = 4  # in beats
MAX_VIEWERS = 8
READ_TIMEOUT_S = 20.0
MIN_RESEND_INTERVAL_S = 1.0


class Viewer:
    def __init__(self) -> None:
        self.ended = False
        self.behind = True  # True if the viewer needs the full state
        self.taken_at = 0.0
        self._slot: bytes | None = None
        self._filled = asyncio.Event()

    @property
    def busy(self) -> bool:
        """True if the viewer has not read its last message."""
        return self._slot is not None

    def put(self, message: bytes) -> None:
        self._slot = message
        self._filled.set()

    async def get(self) -> bytes | None:
        """Wait for a message; return None at the end."""
        await self._filled.wait()
        self._filled.clear()
        message, self._slot = self._slot, None
        return None if self.ended else message

    def end(self) -> None:
        self.ended = True
        self._filled.set()


class LiveView:
    def __init__(
        self,
        metrics: Metrics,
        state: LiveState,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.recorder = LiveRecorder(metrics, state.figures, clock, wall)
        # With several processes: collects the parts of all.
        self.collect_all: Callable[[UpdateRequest], Awaitable[list[LiveUpdate]]] | None = None
        self._state = state
        self._clock = clock
        self._zero = clock()
        self._run_id = os.urandom(4).hex()
        self._viewers: set[Viewer] = set()
        self._part_numbers: dict[str, int] = {}  # number of each process's last part
        self._resent_at = -inf
        self._beats = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def join(self) -> Viewer | None:
        """Open a page; return None if too many are open."""
        if len(self._viewers) >= MAX_VIEWERS or self._closed:
            return None
        viewer = Viewer()
        viewer.taken_at = self._clock()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self.recorder.start(self._clock())
            self._task = asyncio.get_running_loop().create_task(self._run(), name="live")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        viewer.end()
        self._viewers.discard(viewer)

    def close(self) -> None:
        """End all pages; browsers reconnect by themselves."""
        self._closed = True
        for viewer in list(self._viewers):
            self.leave(viewer)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._viewers:
                await self.send_updates()
                await asyncio.sleep(BEAT_INTERVAL_S)
        finally:
            self.recorder.end()

    async def send_updates(self) -> None:
        now = self._clock()
        last_minute = any(viewer.behind and not viewer.busy for viewer in self._viewers)
        update_request = UpdateRequest(
            self._zero, last_minute, self._beats % STATE_EVERY_BEATS == 0 or last_minute
        )
        self._beats += 1
        self._send(now, await self._parts(now, update_request))

    async def _parts(self, now: float, update_request: UpdateRequest) -> list[LiveUpdate]:
        if self.collect_all is not None:
            with suppress(TimeoutError):  # this process's own part is better than nothing
                return await self.collect_all(update_request)
        return [self.recorder.update(now, update_request)]

    def _check_gaps(self, now: float, parts: list[LiveUpdate]) -> None:
        """Mark all viewers for the full state if an update may be lost, at limited frequency."""
        numbers = {part.source: part.number for part in parts}
        if numbers == {source: number + 1 for source, number in self._part_numbers.items()}:
            self._part_numbers = numbers
        elif now >= self._resent_at + MIN_RESEND_INTERVAL_S:
            self._part_numbers, self._resent_at = numbers, now
            for viewer in self._viewers:
                viewer.behind = True
        # Otherwise `_part_numbers` stays as it is, so that the next beat sees the gap again.

    def _send(self, now: float, parts: list[LiveUpdate]) -> None:
        self._check_gaps(now, parts)
        update: dict[str, Any] = {
            "now": round((now - self._zero) * 1000),
            "rows": [row for part in parts for row in part.rows],
            "ticks": [tick for part in parts for tick in part.ticks],
            "dropped": sum(part.dropped for part in parts),
        }
        figures = [part.figures for part in parts if part.figures is not None]
        if figures:
            update["state"] = self._state.as_json(now, figures)
        message = event("news", update)
        full_state: bytes | None = None
        for viewer in list(self._viewers):
            if viewer.busy:
                viewer.behind = True
                if now - viewer.taken_at > READ_TIMEOUT_S:
                    self.leave(viewer)
                continue
            viewer.taken_at = now
            if not viewer.behind:
                viewer.put(message)
            elif all(part.last_minute is not None for part in parts):
                full_state = full_state or self._full_state(now, parts, figures)
                viewer.behind = False
                viewer.put(full_state)

    def _full_state(self, now: float, parts: list[LiveUpdate], figures: list[LiveCounts]) -> bytes:
        data = {
            "run": self._run_id,
            "fields": FIELDS,
            "now": round((now - self._zero) * 1000),
            "rows": [row for part in parts for row in part.last_minute or ()],
            "ticks": [],
            "state": self._state.as_json(now, figures),
        }
        return event("all", data)


def event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))

"""Large bodies that are read one after another, one step in each turn of the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from proxy.core.request.json_body import LargeBody

logger = logging.getLogger(__name__)

Done = Callable[[float, LargeBody], None]
Fail = Callable[[float], None]


class LargeBodyReader:
    def __init__(self, body: bytes, on_done: Done, fail: Fail, clock: Callable[[], float]) -> None:
        self._body: LargeBody | None = LargeBody(body)
        self._done = on_done
        self._fail = fail
        self._clock = clock

    def drop(self) -> None:
        self._body = None

    def step(self) -> bool:
        """Read a part; return whether another one follows."""
        if (body := self._body) is None:
            return False
        try:
            if body.advance():
                return True
            self._body = None  # with what was parsed
            self._done(self._clock(), body)
        except Exception:  # other bodies wait
            logger.exception("cannot read a large body")
            self._fail(self._clock())
        return False


class LargeBodyQueue:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.added = 0
        self._clock = clock
        self._readers: deque[LargeBodyReader] = deque()

    def add(self, body: bytes, on_done: Done, fail: Fail) -> LargeBodyReader:
        """Read a body in later turns, then call `on_done`, or `fail` after an exception."""
        self.added += 1
        reader = LargeBodyReader(body, on_done, fail, self._clock)
        self._readers.append(reader)
        if len(self._readers) == 1:
            self._call_soon()
        return reader

    def _call_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        goes_on = False
        try:
            goes_on = self._readers[0].step()
        finally:
            if not goes_on:
                self._readers.popleft()
            if self._readers:
                self._call_soon()

"""Large bodies that are read one after another, one step in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class LargeBodyQueue:
    """Calls readers in later turns until they return False."""

    def __init__(self) -> None:
        self._readers: deque[Callable[[], bool]] = deque()

    def add(self, reader: Callable[[], bool]) -> None:
        self._readers.append(reader)
        if len(self._readers) == 1:
            self._call_soon()

    def _call_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        goes_on = False
        try:
            goes_on = self._readers[0]()
        finally:
            if not goes_on:
                self._readers.popleft()
            if self._readers:
                self._call_soon()

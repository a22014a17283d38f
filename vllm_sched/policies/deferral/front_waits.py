"""How long the front requests of the lanes have been held, over several holds."""

from __future__ import annotations

import math
from typing import Final

# Start of the wait of a request that was held for the maximum time.
RELEASED: Final = -math.inf


class FrontWaits:
    """The held front requests, one per lane of other policies."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._asked: set[str] = set()  # fronts of the current step

    def begin_step(self) -> None:
        if self._asked:
            self._since = {name: at for name, at in self._since.items() if name in self._asked}
            self._asked.clear()

    def ask(self, name: str) -> None:
        self._asked.add(name)

    def hold(self, name: str, now: float) -> None:
        self._since.setdefault(name, now)

    def forget(self, name: str) -> None:
        self._since.pop(name, None)

    def waited(self, name: str, now: float) -> float:
        return now - self._since.get(name, now)

    def longest(self, now: float) -> float:
        return now - min(self._since.values(), default=now)

    def release(self, now: float, max_wait_s: float) -> None:
        """Mark requests that were held for the maximum time."""
        for name, since in self._since.items():
            if now - since >= max_wait_s:
                self._since[name] = RELEASED

    @property
    def any_released(self) -> bool:
        return RELEASED in self._since.values()

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
        """Forget requests that are no longer fronts."""
        if self._asked:
            self._since = {name: at for name, at in self._since.items() if name in self._asked}
            self._asked.clear()

    def ask(self, name: str) -> None:
        """Record that the request is a front in this step."""
        self._asked.add(name)

    def hold(self, name: str, now: float) -> None:
        """Record that the request is held."""
        self._since.setdefault(name, now)

    def forget(self, name: str) -> None:
        """Forget a request that was admitted or has left."""
        self._since.pop(name, None)

    def waited(self, name: str, now: float) -> float:
        """Return the seconds that the request has been held."""
        return now - self._since.get(name, now)

    def longest(self, now: float) -> float:
        """Return the longest wait."""
        return now - min(self._since.values(), default=now)

    def release(self, now: float, max_wait_s: float) -> None:
        """Mark requests that were held for the maximum time."""
        for name, since in self._since.items():
            if now - since >= max_wait_s:
                self._since[name] = RELEASED

    @property
    def any_released(self) -> bool:
        """Return whether a front was marked."""
        return RELEASED in self._since.values()

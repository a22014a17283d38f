"""Look-ups of the cached prefix of waiting requests, and when to repeat them.

A look-up takes time for each cached block, and the cache may grow in every step. The delay before
the next look-up limits the cost per held request to 1 % of the engine's time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Delay per cached token: 100 times the 50 ns of a look-up.
LOOK_AGAIN_S: Final = 5e-6


class Lookup(NamedTuple):
    """One look-up of a waiting request's cached prefix."""

    changes: int  # cache changes before the look-up
    again_at: float  # earliest time of the next look-up
    tokens: int  # cached


class PrefixLookups:
    """Requests with one result of the look-up, such as long."""

    def __init__(self) -> None:
        self._found: dict[str, Lookup] = {}
        self._changes = 0

    def changed(self, now: float) -> None:
        """Forget look-ups that are due, since the cache may have grown."""
        self._changes += 1
        if self._found:
            self._found = {name: f for name, f in self._found.items() if f.again_at > now}

    def holds(self, name: str, now: float) -> bool:
        found = self._found.get(name)
        return found is not None and (found.changes == self._changes or now < found.again_at)

    def tokens(self, name: str) -> int:
        """Return the cached tokens that the last look-up found."""
        return self._found[name].tokens

    def add(self, name: str, cached: int, now: float) -> None:
        self._found[name] = Lookup(self._changes, now + LOOK_AGAIN_S * cached, cached)

    def discard(self, name: str) -> None:
        self._found.pop(name, None)

    def __contains__(self, name: str) -> bool:
        """Return whether the request is recorded, valid or not."""
        return name in self._found

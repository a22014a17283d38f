"""Who was found to have much to compute beyond what is cached, and when to look again.

To look through the cache takes time for each block that is found. Whoever is held with a long
prefix cached would be looked up again whenever that may have grown, which under a steady stream of
shorts is in each step. So it isn't before a time that goes by how much was found: a hundredth of
the engine's time, and no more, is spent on looking up each, and that more or less is cached of one
of whom 100,000 tokens are is seen half a second late at most. One of whom little is cached is
looked up at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Per cached token. To find one takes some 50 ns: a hundredth of it.
LOOK_AGAIN_S: Final = 5e-6


class Lookup(NamedTuple):
    """A look at what is cached of one who waits."""

    changes: int  # of the cache until then
    again_at: float  # the earliest time to look again


class PrefixLookups:
    """See the module's text."""

    def __init__(self) -> None:
        self._found: dict[str, Lookup] = {}
        self._changes = 0

    def changed(self, now: float) -> None:
        """Hear that more may be cached; whoever may be looked up again is forgotten."""
        self._changes += 1
        if self._found:
            self._found = {name: f for name, f in self._found.items() if f.again_at > now}

    def holds(self, name: str, now: float) -> bool:
        """Tell whether what was found of it is to stand."""
        found = self._found.get(name)
        return found is not None and (found.changes == self._changes or now < found.again_at)

    def add(self, name: str, cached: int, now: float) -> None:
        """Note that so many tokens of it are cached, and that this is little."""
        self._found[name] = Lookup(self._changes, now + LOOK_AGAIN_S * cached)

    def discard(self, name: str) -> None:
        """Forget one."""
        self._found.pop(name, None)

    def __contains__(self, name: str) -> bool:
        """Tell whether it was found so when it was looked up last."""
        return name in self._found

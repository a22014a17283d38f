"""Lines in the order of their turns: those of one class that wait at one place.

Sorted, in stretches of which each knows the least context that any in it needs: who looks for one
that needs less than so much passes over a stretch at a time. Of a thousand lines that is a look at
some thirty numbers, and to put one elsewhere costs the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from proxy.core.queue.request_fifo import Entry, RequestFifo

LONGEST, SHORTEST = 64, 8  # stretches


class Segment:
    """Some that stand beside each other."""

    __slots__ = ("entries", "least")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.least = min(entry[3] for entry in entries)


class SortedBuckets:
    """All of them."""

    __slots__ = ("_stretches",)

    def __init__(self) -> None:
        self._stretches: list[Segment] = []

    def first(self) -> RequestFifo:
        """Return whose turn it is."""
        return self._stretches[0].entries[0][4]

    def below(self, most: Callable[[], int]) -> Iterator[Entry]:
        """Go through those that need less than that, which may become less on the way.

        Nothing may be put or taken meanwhile.
        """
        bound = most()
        for stretch in self._stretches:
            if stretch.least >= bound:
                continue
            for entry in stretch.entries:
                if entry[3] < bound:
                    yield entry
                    bound = most()

    def put(self, entry: Entry) -> None:
        """Let one in, where it belongs."""
        stretches = self._stretches
        if not stretches:
            stretches.append(Segment([entry]))
            return
        at = min(self._find(entry), len(stretches) - 1)
        stretch = stretches[at]
        insort(stretch.entries, entry)
        stretch.least = min(stretch.least, entry[3])
        if len(stretch.entries) > LONGEST:
            half = len(stretch.entries) // 2
            entries = stretch.entries
            stretches[at : at + 1] = Segment(entries[:half]), Segment(entries[half:])

    def take(self, entry: Entry) -> None:
        """Let one out."""
        stretches = self._stretches
        at = self._find(entry)
        entries = stretches[at].entries
        del entries[bisect_left(entries, entry)]
        if len(entries) >= SHORTEST or (len(stretches) == 1 and entries):
            if entry[3] == stretches[at].least:
                stretches[at].least = min(each[3] for each in entries)
            return
        del stretches[at]
        for each in entries:  # too few for a stretch of their own
            self.put(each)

    def _find(self, entry: Entry) -> int:
        return bisect_left(self._stretches, entry, key=_last)


def _last(stretch: Segment) -> Entry:
    return stretch.entries[-1]

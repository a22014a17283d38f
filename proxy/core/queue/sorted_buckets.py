"""The FIFOs of one class at one place, sorted by turn.

A sorted list of segments. A segment knows its least context need, so a search for smaller requests
skips segments. With a thousand FIFOs, a search or move reads some thirty numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from proxy.core.queue.request_fifo import Entry, RequestFifo

LONGEST, SHORTEST = 64, 8  # entries of a segment


class Segment:
    """Consecutive entries."""

    __slots__ = ("entries", "least")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.least = min(entry[3] for entry in entries)


class SortedBuckets:
    __slots__ = ("_stretches",)

    def __init__(self) -> None:
        self._stretches: list[Segment] = []

    def first(self) -> RequestFifo:
        return self._stretches[0].entries[0][4]

    def below(self, most: Callable[[], int]) -> Iterator[Entry]:
        """Yield the entries that need less than `most()`, which may fall between entries.

        The entries must not change meantime.
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
        stretches = self._stretches
        at = self._find(entry)
        entries = stretches[at].entries
        del entries[bisect_left(entries, entry)]
        if len(entries) >= SHORTEST or (len(stretches) == 1 and entries):
            if entry[3] == stretches[at].least:
                stretches[at].least = min(each[3] for each in entries)
            return
        del stretches[at]
        for each in entries:  # too few for a segment
            self.put(each)

    def _find(self, entry: Entry) -> int:
        return bisect_left(self._stretches, entry, key=_last)


def _last(stretch: Segment) -> Entry:
    return stretch.entries[-1]

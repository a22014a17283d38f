"""The FIFOs of one class at one place, sorted by turn.

A sorted list of segments. A segment knows its least context need, so a search for smaller requests
skips segments. With a thousand FIFOs, a search or move reads some thirty numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from proxy.core.queue.request_fifo import FIFO, NEED, Entry, RequestFifo

MAX_SEGMENT_ENTRIES, MIN_SEGMENT_ENTRIES = 64, 8  # entries of a segment


class Segment:
    __slots__ = ("entries", "least_need")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.least_need = min(entry[NEED] for entry in entries)


class SortedFifos:
    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def first(self) -> RequestFifo:
        return self._segments[0].entries[0][FIFO]

    def below(self, limit: Callable[[], int]) -> Iterator[Entry]:
        """Yield the entries that need less than `limit()`, which may fall between entries.

        The entries must not change meantime.
        """
        bound = limit()
        for segment in self._segments:
            if segment.least_need >= bound:
                continue
            for entry in segment.entries:
                if entry[NEED] < bound:
                    yield entry
                    bound = limit()

    def put(self, entry: Entry) -> None:
        segments = self._segments
        if not segments:
            segments.append(Segment([entry]))
            return
        at = min(self._find(entry), len(segments) - 1)
        segment = segments[at]
        insort(segment.entries, entry)
        segment.least_need = min(segment.least_need, entry[NEED])
        if len(segment.entries) > MAX_SEGMENT_ENTRIES:
            half = len(segment.entries) // 2
            entries = segment.entries
            segments[at : at + 1] = Segment(entries[:half]), Segment(entries[half:])

    def remove(self, entry: Entry) -> None:
        segments = self._segments
        at = self._find(entry)
        entries = segments[at].entries
        del entries[bisect_left(entries, entry)]
        if len(entries) >= MIN_SEGMENT_ENTRIES or (len(segments) == 1 and entries):
            if entry[NEED] == segments[at].least_need:
                segments[at].least_need = min(other[NEED] for other in entries)
            return
        del segments[at]
        for other in entries:  # too few for a segment
            self.put(other)

    def _find(self, entry: Entry) -> int:
        return bisect_left(self._segments, entry, key=_last)


def _last(segment: Segment) -> Entry:
    return segment.entries[-1]

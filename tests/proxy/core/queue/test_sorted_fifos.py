"""Sorted buckets, compared with a plain sorted list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.queue.request_fifo import Entry, RequestFifo
from proxy.core.queue.sorted_fifos import MAX_SEGMENT_ENTRIES, SortedFifos
from proxy.core.tenants.tenants import Rank

NUMBERS = count()


def entry(standing: float, least: int = 100, since: float = 0.0) -> Entry:
    number = next(NUMBERS)
    line = RequestFifo((("m", "short"), Rank.STANDARD, None), number, 0.0)
    return standing, 0.0, since, number, least, line


def segments(order: SortedFifos) -> Iterator[tuple[list[Entry], int]]:
    return ((segment.entries, segment.least_need) for segment in order._segments)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50), st.booleans()), max_size=400),
    st.integers(0, 51),
)
@settings(deadline=None)
def test_order_equals_a_sorted_list(steps: list[tuple[int, int, bool]], limit: int) -> None:
    order, plain = SortedFifos(), list[Entry]()
    for standing, least, goes in steps:
        if goes and plain:
            gone = plain.pop(standing * least % len(plain))
            order.remove(gone)
        else:
            added = entry(float(standing), least)
            plain.append(added)
            plain.sort()
            order.put(added)
        for entries, known in segments(order):
            assert 0 < len(entries) <= MAX_SEGMENT_ENTRIES
            assert known == min(item[4] for item in entries)
    assert [item for entries, _ in segments(order) for item in entries] == plain
    assert list(order.below(lambda: limit)) == [item for item in plain if item[4] < limit]
    if plain:
        assert order.first() is plain[0][5]


def test_small_entry_is_found_without_a_full_scan() -> None:
    order = SortedFifos()
    entries = [entry(float(number), 1000) for number in range(5000)]
    small = entry(4000.5, 10)
    for item in (*entries, small):
        order.put(item)
    calls = 0

    def limit() -> int:
        nonlocal calls
        calls += 1
        return 1000

    assert list(order.below(limit)) == [small]
    assert calls == 2


def test_remaining_entries_are_merged_into_few_segments() -> None:
    """Otherwise a scan would visit one segment per entry in the end."""
    order = SortedFifos()
    entries = [entry(float(number)) for number in range(3000)]
    for item in entries:
        order.put(item)
    for number, item in enumerate(entries):
        if number % 30:
            order.remove(item)
    assert sum(len(entries) for entries, _ in segments(order)) == 100
    assert len(list(segments(order))) <= 15

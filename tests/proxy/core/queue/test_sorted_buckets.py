"""Lines in their order, held against a plain sorted list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.queue.request_fifo import Entry, RequestFifo
from proxy.core.queue.sorted_buckets import MAX_SEGMENT_ENTRIES, SortedBuckets
from proxy.core.tenants.tenants import Rank

NUMBERS = count()


def entry(standing: float, least: int = 100, since: float = 0.0) -> Entry:
    number = next(NUMBERS)
    line = RequestFifo((("m", "short"), Rank.STANDARD, None), number)
    return standing, since, number, least, line


def stretches(order: SortedBuckets) -> Iterator[tuple[list[Entry], int]]:
    return ((each.entries, each.least) for each in order._segments)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50), st.booleans()), max_size=400),
    st.integers(0, 51),
)
@settings(deadline=None)
def test_it_is_as_a_sorted_list(steps: list[tuple[int, int, bool]], most: int) -> None:
    order, plain = SortedBuckets(), list[Entry]()
    for standing, least, goes in steps:
        if goes and plain:
            gone = plain.pop(standing * least % len(plain))
            order.take(gone)
        else:
            one = entry(float(standing), least)
            plain.append(one)
            plain.sort()
            order.put(one)
        for entries, known in stretches(order):
            assert 0 < len(entries) <= MAX_SEGMENT_ENTRIES
            assert known == min(each[3] for each in entries)
    assert [each for entries, _ in stretches(order) for each in entries] == plain
    assert list(order.below(lambda: most)) == [each for each in plain if each[3] < most]
    if plain:
        assert order.first() is plain[0][4]


def test_one_that_needs_less_is_found_among_many_without_a_look_at_all() -> None:
    order = SortedBuckets()
    entries = [entry(float(number), 1000) for number in range(5000)]
    small = entry(4000.5, 10)
    for each in (*entries, small):
        order.put(each)
    asked = 0

    def most() -> int:
        nonlocal asked
        asked += 1
        return 1000

    assert list(order.below(most)) == [small]
    assert asked == 2


def test_what_is_left_of_many_is_in_few_stretches() -> None:
    """Else a look at a thousand that come and go would be one at each in the end."""
    order = SortedBuckets()
    entries = [entry(float(number)) for number in range(3000)]
    for each in entries:
        order.put(each)
    for number, each in enumerate(entries):
        if number % 30:
            order.take(each)
    assert sum(len(entries) for entries, _ in stretches(order)) == 100
    assert len(list(stretches(order))) <= 15


def test_what_may_be_asked_for_becomes_less_on_the_way() -> None:
    order = SortedBuckets()
    for number in range(100):
        order.put(entry(float(number), 100 - number))
    tried: list[int] = []
    for *_, least, _ in order.below(lambda: min(tried, default=1000)):
        if not tried or len(tried) < 3:
            tried.append(least - 20)
    assert tried == [80, 59, 38]


@pytest.mark.parametrize("which", [0, 70, 199])
def test_to_take_one_leaves_the_others(which: int) -> None:
    order = SortedBuckets()
    entries = [entry(float(number)) for number in range(200)]
    for each in entries:
        order.put(each)
    order.take(entries[which])
    assert [each for there, _ in stretches(order) for each in there] == [
        each for each in entries if each is not entries[which]
    ]

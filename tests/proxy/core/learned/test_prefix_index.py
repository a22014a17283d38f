"""Hashes of prompt blocks, and who holds them."""

from __future__ import annotations

import sys
from collections.abc import ItemsView
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.prefix_index import BLOCKS, PrefixIndex, workers_of_deepest

BLOCK = BLOCKS[0]


def text(*blocks: str) -> bytes:
    """Write whole blocks, each of one letter."""
    return b"".join(letter.encode() * BLOCK for letter in blocks)


def held(index: PrefixIndex, body: bytes) -> dict[int, int]:
    """Return how many blocks each worker may hold."""
    found: dict[int, int] = {}
    for blocks, holders in index.matches(index.hashes("m", body)):
        for worker in range(200):
            if holders >> worker & 1:
                found.setdefault(worker, blocks)
    return found


def test_a_block_is_not_itself_behind_another() -> None:
    index = PrefixIndex()
    assert index.hashes("m", text("a", "b"))[1] != index.hashes("m", text("c", "b"))[1]


def test_each_worker_is_matched_as_deep_as_it_was_sent() -> None:
    index = PrefixIndex()
    index.record(index.hashes("m", text("a", "b", "c")), 0)
    index.record(index.hashes("m", text("a", "b", "x")), 1)
    index.record(index.hashes("m", text("a", "y")), 130)
    assert held(index, text("a", "b", "c", "d")) == {0: 3, 1: 2, 130: 1}
    assert held(index, text("z")) == {}


def test_the_deepest_holders_are_named_first() -> None:
    index = PrefixIndex()
    index.record(index.hashes("m", text("a", "b")), 5)
    index.record(index.hashes("m", text("a", "b")), 9)
    index.record(index.hashes("m", text("a")), 1)
    matches = index.matches(index.hashes("m", text("a", "b")))
    assert workers_of_deepest(matches, 4) == [5, 9]
    assert workers_of_deepest(matches, 1) == [5]
    assert workers_of_deepest([], 4) == []


def test_a_worker_is_forgotten_wholly() -> None:
    index = PrefixIndex()
    for worker in (0, 1):
        index.record(index.hashes("m", text("a", "b")), worker)
    index.record(index.hashes("m", text("q")), 0)
    index.forget(0)
    assert held(index, text("a", "b")) == {1: 2}
    assert held(index, text("q")) == {}
    index.record(index.hashes("m", text("z")), 0)  # another in its place, or itself, started anew
    assert held(index, text("a", "b")) == {1: 2}
    assert held(index, text("q")) == {}
    assert held(index, text("z")) == {0: 1}
    assert len(index) == 3


def test_a_thousand_that_go_at_once_are_as_good_as_one() -> None:
    class Counted(dict[int, int]):
        """Knows how often all of it was looked at."""

        times = 0

        def items(self) -> ItemsView[int, int]:
            self.times += 1
            return super().items()

    index = PrefixIndex()
    blocks = index._new = Counted()
    for worker in range(1000):
        index.record((worker,), worker)
    for worker in range(1000):
        index.forget(worker)
    index.record((1000,), 0)
    assert list(blocks) == [1000]
    assert blocks.times == 1


def test_memory_is_bounded() -> None:
    index = PrefixIndex(generation=1000)
    for i in range(0, 20_000, 50):
        index.record(tuple(range(i, i + 50)), i % 7)
        assert len(index) <= 2 * (1000 + len(BLOCKS))


def test_the_bound_that_is_stated() -> None:
    index = PrefixIndex()
    largest = 0
    for block in range(2**40, 2**40 + 70_000):
        index.record((block,), 999)  # a thousand workers: masks as wide as they come
        largest = max(largest, len(index))
    entry = sys.getsizeof(2**40) + sys.getsizeof(1 << 999)
    table = sys.getsizeof(dict.fromkeys(range(largest // 2)))
    assert largest > 60_000
    assert 2 * table + largest * entry < 20e6


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.integers(0, 3)), max_size=12))
def test_matches_are_what_comparing_prompts_would_say(sent: list[tuple[str, int]]) -> None:
    index = PrefixIndex()
    for letters, worker in sent:
        index.record(index.hashes("m", text(*letters)), worker)
    asked = "abab"
    expected: dict[int, int] = {}
    for letters, worker in sent:
        pairs = zip(asked, letters, strict=False)
        same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if same:
            expected[worker] = max(expected.get(worker, 0), same)
    assert held(index, text(*asked)) == expected

"""Hashes of prompt blocks, and the workers that hold them."""

from __future__ import annotations

import sys
from collections.abc import ItemsView
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.prefix_index import BLOCKS, PrefixIndex, workers_of_deepest

BLOCK = BLOCKS[0]


def text(*blocks: str) -> bytes:
    """Return whole blocks, each of one letter."""
    return b"".join(letter.encode() * BLOCK for letter in blocks)


def held(index: PrefixIndex, body: bytes) -> dict[int, int]:
    """Return how many blocks each worker may hold."""
    found: dict[int, int] = {}
    for blocks, holders in index.matches(index.hashes("m", body)):
        for worker in range(200):
            if holders >> worker & 1:
                found.setdefault(worker, blocks)
    return found


def test_hash_of_a_block_depends_on_the_blocks_before_it() -> None:
    index = PrefixIndex()
    assert index.hashes("m", text("a", "b"))[1] != index.hashes("m", text("c", "b"))[1]


def test_match_depth_is_what_each_worker_received() -> None:
    index = PrefixIndex()
    index.record(index.hashes("m", text("a", "b", "c")), 0)
    index.record(index.hashes("m", text("a", "b", "x")), 1)
    index.record(index.hashes("m", text("a", "y")), 130)
    assert held(index, text("a", "b", "c", "d")) == {0: 3, 1: 2, 130: 1}
    assert held(index, text("z")) == {}


def test_workers_of_deepest_returns_deepest_holders() -> None:
    index = PrefixIndex()
    index.record(index.hashes("m", text("a", "b")), 5)
    index.record(index.hashes("m", text("a", "b")), 9)
    index.record(index.hashes("m", text("a")), 1)
    matches = index.matches(index.hashes("m", text("a", "b")))
    assert workers_of_deepest(matches, 4) == [5, 9]
    assert workers_of_deepest(matches, 1) == [5]
    assert workers_of_deepest([], 4) == []


def test_forget_removes_all_blocks_of_a_worker() -> None:
    index = PrefixIndex()
    for worker in (0, 1):
        index.record(index.hashes("m", text("a", "b")), worker)
    index.record(index.hashes("m", text("q")), 0)
    index.forget(0)
    assert held(index, text("a", "b")) == {1: 2}
    assert held(index, text("q")) == {}
    index.record(index.hashes("m", text("z")), 0)  # another worker, or a restart
    assert held(index, text("a", "b")) == {1: 2}
    assert held(index, text("q")) == {}
    assert held(index, text("z")) == {0: 1}
    assert len(index) == 3


def test_forgetting_many_workers_scans_the_blocks_once() -> None:
    class Counted(dict[int, int]):
        """Counts how often all items were read."""

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


def test_block_count_is_bounded() -> None:
    index = PrefixIndex(generation=1000)
    for i in range(0, 20_000, 50):
        index.record(tuple(range(i, i + 50)), i % 7)
        assert len(index) <= 2 * (1000 + len(BLOCKS))


def test_default_index_stays_below_20_mb() -> None:
    index = PrefixIndex()
    largest = 0
    for block in range(2**40, 2**40 + 70_000):
        index.record((block,), 999)  # a thousand workers: the widest masks
        largest = max(largest, len(index))
    entry = sys.getsizeof(2**40) + sys.getsizeof(1 << 999)
    table = sys.getsizeof(dict.fromkeys(range(largest // 2)))
    assert largest > 60_000
    assert 2 * table + largest * entry < 20e6


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.integers(0, 3)), max_size=12))
def test_matches_equal_the_common_prefix_of_prompts(sent: list[tuple[str, int]]) -> None:
    index = PrefixIndex()
    for letters, worker in sent:
        index.record(index.hashes("m", text(*letters)), worker)
    prompt = "abab"
    expected: dict[int, int] = {}
    for letters, worker in sent:
        pairs = zip(prompt, letters, strict=False)
        same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if same:
            expected[worker] = max(expected.get(worker, 0), same)
    assert held(index, text(*prompt)) == expected

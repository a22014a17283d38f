"""Hashes of prompt blocks, and the workers that hold them."""

from __future__ import annotations

import sys
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.learned.prefix_index import BLOCKS, ENDS, PrefixIndex, workers_of_deepest
from proxy.core.learned.radix_tree import RadixTree

BLOCK = BLOCKS[0]
BYTES_PER_TOKEN = 4  # of English text


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


@pytest.mark.plain("replaces a part")
@pytest.mark.parametrize("journal", [False, True])
def test_forgetting_many_workers_scans_the_blocks_once(journal: bool) -> None:
    class Counted(PrefixIndex):
        """Counts the scans of all blocks."""

        scans = 0

        def _sweep(self) -> None:
            self.scans += 1
            super()._sweep()

    class CountedTree(RadixTree):
        scans = 0

        def _sweep(self) -> None:
            self.scans += 1
            super()._sweep()

    index = Counted()
    tree = index._sent = CountedTree()
    for worker in range(1000):
        if journal:
            index.follow(worker)
        index.record((worker,), worker)
    for worker in range(1000):
        index.forget(worker)
    index.record((1000,), 0)
    assert len(index) == 1
    assert index.matches((1000,)) == [(1, 1)]
    assert (index.scans, tree.scans) == (int(journal), int(not journal))


def test_expected_blocks_beside_a_journal_take_less_than_20_mb() -> None:
    index = PrefixIndex()
    index.follow(999)
    largest = 0
    for block in range(2**40, 2**40 + 70_000):
        index.record((block,), 999)  # a thousand workers: the widest masks
        largest = max(largest, len(index))
    entry = sys.getsizeof(2**40) + sys.getsizeof(1 << 999)
    table = sys.getsizeof(dict.fromkeys(range(largest // 2)))
    assert largest > 60_000
    assert 2 * table + largest * entry < 20e6


def test_workers_with_and_without_a_journal_match_together() -> None:
    index = PrefixIndex()
    index.record(index.hashes("m", text("a", "b", "c")), 0)
    index.record(index.hashes("m", text("a", "b")), 1)
    index.follow(2)
    index.record(index.hashes("m", text("a", "b")), 2)
    hashes = index.hashes("m", text("a", "b", "c"))
    assert index.matches(hashes) == [(3, 0b001), (2, 0b111)]
    index.follow(0)  # only what its journal reports counts from now on
    assert index.matches(hashes) == [(2, 0b110)]
    index.add_block(hashes[0], 0, 128)
    assert held(index, text("a", "b", "c")) == {0: 1, 1: 2, 2: 2}


def test_blocks_are_at_most_1024_tokens_up_to_4_mb_and_reach_the_largest_body() -> None:
    sizes = [block for block, end in zip(BLOCKS, ENDS, strict=True) if end <= 4 << 20]
    assert sum(sizes) == 4 << 20
    assert max(sizes) <= 1024 * BYTES_PER_TOKEN
    assert ENDS[-1] == 64 << 20


# Where a prompt leaves another one, its further bytes, and its worker.
TURNS = st.lists(
    st.tuples(st.integers(0, 4 << 20), st.integers(0, 1 << 20), st.integers(0, 3)), max_size=8
)


@settings(max_examples=20, deadline=None)
@given(turns=TURNS, at=st.integers(0, 4 << 20))
def test_match_of_a_long_prompt_is_the_common_prefix_rounded_down(
    turns: list[tuple[int, int, int]], at: int
) -> None:
    index, bodies = PrefixIndex(), [(bytes(4 << 20), -1)]
    for number, (cut, more, worker) in enumerate(turns, 1):
        body = bodies[cut % number][0][:cut] + bytes([number]) * more
        index.record(index.hashes("m", body), worker)
        bodies.append((body, worker))
    body = bodies[at % len(bodies)][0][:at] + b"end"
    expected: dict[int, int] = {}
    for other, worker in bodies[1:]:
        blocks = bisect_right(ENDS, common(body, other))
        if blocks:
            expected[worker] = max(expected.get(worker, 0), blocks)
    assert held(index, body) == expected


def common(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low

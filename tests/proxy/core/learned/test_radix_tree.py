"""The radix tree, compared with all prompts that were sent."""

from __future__ import annotations

import sys
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.radix_tree import MAX_HASHES, MAX_NODES, RadixNode, RadixTree

Prompt = tuple[int, ...]
# Where a prompt leaves another one, its length, and its worker.
SENT = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=20
)
OLD_SESSION, NEW_SESSION = tuple(range(100, 110)), tuple(range(200, 210))


def prompts(sent: list[tuple[int, int, int]]) -> list[tuple[Prompt, int]]:
    """Return chained hashes: each prompt shares the given depth with another, then differs."""
    made: list[tuple[Prompt, int]] = []
    for number, (cut, size, worker) in enumerate(sent, 1):
        along = made[cut % len(made)][0][:cut] if made else ()
        own = range(1000 * number + len(along), 1000 * number + 40)
        made.append(((*along, *own)[:size], worker))
    return made


def matched(tree: RadixTree, prompt: Prompt) -> dict[int, int]:
    """Return the matched length for each worker."""
    found: dict[int, int] = {}
    for length, workers in tree.matches(prompt):
        for worker in range(8):
            if workers >> worker & 1:
                found.setdefault(worker, length)
    return found


def shared(one: Prompt, other: Prompt) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def nodes_by_age(tree: RadixTree) -> list[RadixNode]:
    found, node = [], tree._root.newer
    while node is not tree._root:
        found.append(node)
        node = node.newer
    return found


def check_nodes(tree: RadixTree) -> None:
    """Check the sums, and that a leaf is the oldest node."""
    nodes = nodes_by_age(tree)
    assert tree.nodes == len(nodes)
    assert tree.hashes == sum(len(node.hashes) for node in nodes)
    seen: set[int] = set()
    for node in nodes:
        assert all(id(below) in seen for below in node.below.values())
        seen.add(id(node))


@given(sent=SENT, gone=st.integers(0, 2))
def test_match_is_the_common_prefix_of_all_that_a_worker_got(
    sent: list[tuple[int, int, int]], gone: int
) -> None:
    tree, known = RadixTree(), []
    for prompt, worker in prompts(sent):
        new = shared(prompt, prompt) > max(
            (shared(prompt, other) for other, holder in known if holder == worker), default=0
        )
        assert tree.record(prompt, worker) is new
        known.append((prompt, worker))
        check_nodes(tree)
    for again in (False, True):
        for prompt, _ in known:
            expected: dict[int, int] = {}
            for other, worker in known:
                if not again or worker != gone:
                    length = shared(prompt, other)
                    expected[worker] = max(expected.get(worker, 0), length)
            assert matched(tree, prompt) == {w: size for w, size in expected.items() if size}
        tree.forget(gone)
    tree.record((1,), gone)
    check_nodes(tree)
    assert matched(tree, (1,)) == {gone: 1}


@given(sent=SENT)
def test_bounds_hold_and_the_prompt_sent_last_is_known(sent: list[tuple[int, int, int]]) -> None:
    tree = RadixTree(max_hashes=60, max_nodes=4)
    for prompt, worker in prompts(sent):
        tree.record(prompt, worker)
        check_nodes(tree)
        assert tree.hashes <= 60
        assert tree.nodes <= 4
        assert matched(tree, prompt).get(worker) == len(prompt) or tree.nodes == 4


def test_least_recently_sent_session_is_evicted_after_its_common_beginning_is_shared() -> None:
    tree, common = RadixTree(max_hashes=25), (1, 2, 3)
    tree.record(common + OLD_SESSION, 0)
    tree.record(common + NEW_SESSION, 0)
    tree.record(common + OLD_SESSION, 0)
    tree.record((*common, 7, 8, 9), 1)
    assert matched(tree, common + NEW_SESSION) == {0: 3, 1: 3}
    assert matched(tree, common + OLD_SESSION) == {0: 13, 1: 3}


def test_hidden_workers_do_not_match() -> None:
    tree = RadixTree()
    tree.record((1, 2), 0)
    tree.record((1,), 1)
    assert tree.matches((1, 2), hidden=0b01) == [(1, 0b10)]
    assert tree.matches((1, 2), hidden=0b11) == []


@pytest.mark.parametrize("workers", [1, 1000])
def test_ten_thousand_sessions_of_300k_tokens_take_less_than_200_mb(workers: int) -> None:
    tree = RadixTree()
    for number in range(100):
        for turn in range(1, 21):
            tree.record(tuple(range(number << 32, (number << 32) + 16 * turn)), workers - 1)
    size = sum(
        sys.getsizeof(node) + sys.getsizeof(node.hashes) + sys.getsizeof(node.workers)
        for node in nodes_by_age(tree)
    )
    keys = sys.getsizeof(2**60) + 104  # a dictionary's entry at its largest
    assert tree.nodes == 100
    assert 100 * (size + 100 * keys) < 200e6
    assert tree.hashes * 100 < MAX_HASHES
    assert MAX_HASHES * 8 * 9 / 8 + MAX_NODES * 700 < 200e6

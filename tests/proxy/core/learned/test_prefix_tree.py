"""The prefix tree, compared with a count of every block of every prompt."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.prefix_index import BLOCKS, COVERED
from proxy.core.learned.prefix_tree import PrefixNode, PrefixTree
from tests.present import present

ALL = len(BLOCKS)
# Where a prompt leaves the path of the one before it, and where it ends.
PROMPTS = st.lists(st.tuples(st.integers(0, ALL - 1), st.integers(1, ALL)), min_size=1, max_size=12)


def chains(prompts: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Return chained hashes: each prompt shares the given depth with another, then differs."""
    all_chains: list[tuple[int, ...]] = []
    for number, (way, size) in enumerate(prompts):
        along = all_chains[way % number][:way] if number else ()
        alone = range(1000 * number + len(along), 1000 * number + ALL)
        all_chains.append((*along, *alone)[:size])
    return all_chains


def held(chain: tuple[int, ...], holders: Counter[int]) -> int:
    """Return how many tokens of a chain are held."""
    return sum(size for size, block in zip(BLOCKS, chain, strict=False) if holders[block])


@given(prompts=PROMPTS, shuffler=st.randoms(use_true_random=False))
def test_each_held_block_is_counted_once(prompts: list[tuple[int, int]], shuffler: Random) -> None:
    stems = PrefixTree()
    ends: dict[tuple[int, ...], list[PrefixNode]] = {}
    holders: Counter[int] = Counter()
    for chain in chains(prompts):
        shared = stems.shared(chain)
        stem, found = stems.hold(chain, 1.0)
        assert found == shared == held(chain, holders)
        holders.update(chain)
        ends.setdefault(chain, []).append(stem)
        check_agreement(stems, holders, ends)
    held_chains = [chain for chain, nodes in ends.items() for _ in nodes]
    shuffler.shuffle(held_chains)
    for chain in held_chains:
        stems.let_go(ends[chain].pop())
        holders.subtract(chain)
        check_agreement(stems, holders, ends)
    assert not stems._root.below


def check_agreement(
    stems: PrefixTree, holders: Counter[int], ends: dict[tuple[int, ...], list[PrefixNode]]
) -> None:
    sizes = {block: BLOCKS[n] for chain in ends for n, block in enumerate(chain)}
    assert stems.tokens == sum(sizes[block] for block, number in holders.items() if number)
    more = {block: number - 1 for block, number in holders.items() if number > 1}
    assert stems.saved == sum(sizes[block] * number for block, number in more.items())


def test_node_splits_where_another_prompt_branches_off() -> None:
    stems = PrefixTree()
    long = tuple(range(ALL))
    stem, _ = stems.hold(long, 0.25)
    assert (stem.begin, stem.end) == (0, ALL)
    other, found = stems.hold((*long[:30], -1, -2), 0.25)
    assert found == COVERED[30] // 4
    assert other.above is stem.above
    assert (present(stem.above).end, stem.begin, other.begin) == (30, 30, 30)
    stems.let_go(stem)
    assert stems.tokens == COVERED[32] // 4


@pytest.mark.parametrize("depth", [1, 2, 31, 32, ALL - 1, ALL])
def test_prompt_that_ends_within_another_shares_all_its_blocks(depth: int) -> None:
    stems = PrefixTree()
    whole, _ = stems.hold(tuple(range(ALL)), 1.0)
    part, found = stems.hold(tuple(range(depth)), 1.0)
    assert (part is whole, found) == (depth == ALL, COVERED[depth])
    stems.let_go(whole)
    assert stems.tokens == COVERED[depth]
    stems.let_go(part)
    assert (stems.tokens, stems.saved) == (0, 0)


def test_first_holder_sets_the_tokens_per_byte_of_a_block() -> None:
    stems = PrefixTree()
    stems.hold((1, 2), 0.25)
    assert stems.hold((1, 3), 0.5)[1] == 128
    assert (stems.tokens, stems.saved) == (128 + 128 + 256, 128)

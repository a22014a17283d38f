"""The tree of beginnings, held against one that keeps every block of every prompt."""

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
    """Write chained hashes: each prompt goes another's way as far as told, and then its own."""
    made: list[tuple[int, ...]] = []
    for number, (way, size) in enumerate(prompts):
        along = made[way % number][:way] if number else ()
        alone = range(1000 * number + len(along), 1000 * number + ALL)
        made.append((*along, *alone)[:size])
    return made


def held(chain: tuple[int, ...], holders: Counter[int]) -> int:
    """Say how many tokens of a chain somebody holds."""
    return sum(size for size, block in zip(BLOCKS, chain, strict=False) if holders[block])


@given(prompts=PROMPTS, going=st.randoms(use_true_random=False))
def test_each_block_is_counted_once_while_anybody_holds_it(
    prompts: list[tuple[int, int]], going: Random
) -> None:
    tree = PrefixTree()
    ends: dict[tuple[int, ...], list[PrefixNode]] = {}
    holders: Counter[int] = Counter()
    for chain in chains(prompts):
        shared = tree.shared(chain)
        node, found = tree.hold(chain, 1.0)
        assert found == shared == held(chain, holders)
        holders.update(chain)
        ends.setdefault(chain, []).append(node)
        agrees(tree, holders, ends)
    leaving = [chain for chain, some in ends.items() for _ in some]
    going.shuffle(leaving)
    for chain in leaving:
        tree.release(ends[chain].pop())
        holders.subtract(chain)
        agrees(tree, holders, ends)
    assert not tree._root.below


def agrees(
    tree: PrefixTree,
    holders: Counter[int],
    ends: dict[tuple[int, ...], list[PrefixNode]],
) -> None:
    """Compare with what each block's holders say."""
    sizes = {block: BLOCKS[n] for chain in ends for n, block in enumerate(chain)}
    assert tree.tokens == sum(sizes[block] for block, number in holders.items() if number)
    more = {block: number - 1 for block, number in holders.items() if number > 1}
    assert tree.saved == sum(sizes[block] * number for block, number in more.items())


def test_a_prompt_of_one_s_own_is_one_stem_until_another_leaves_its_way() -> None:
    tree = PrefixTree()
    long = tuple(range(ALL))
    node, _ = tree.hold(long, 0.25)
    assert (node.begin, node.end) == (0, ALL)
    other, found = tree.hold((*long[:30], -1, -2), 0.25)
    assert found == COVERED[30] // 4
    assert other.above is node.above
    assert (present(node.above).end, node.begin, other.begin) == (30, 30, 30)
    tree.release(node)
    assert tree.tokens == COVERED[32] // 4


@pytest.mark.parametrize("depth", [1, 2, 31, 32, ALL - 1, ALL])
def test_one_that_ends_within_another_s_shares_all_of_it(depth: int) -> None:
    tree = PrefixTree()
    whole, _ = tree.hold(tuple(range(ALL)), 1.0)
    part, found = tree.hold(tuple(range(depth)), 1.0)
    assert (part is whole, found) == (depth == ALL, COVERED[depth])
    tree.release(whole)
    assert tree.tokens == COVERED[depth]
    tree.release(part)
    assert (tree.tokens, tree.saved) == (0, 0)


def test_who_brought_it_says_how_many_tokens_it_is() -> None:
    tree = PrefixTree()
    tree.hold((1, 2), 0.25)
    assert tree.hold((1, 3), 0.5)[1] == 128
    assert (tree.tokens, tree.saved) == (128 + 128 + 256, 128)

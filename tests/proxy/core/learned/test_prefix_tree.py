"""The prefix tree, compared with a count of every block of every prompt."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.prefix_index import BLOCKS
from proxy.core.learned.prefix_tree import PrefixNode, PrefixTree

ALL = 96  # blocks
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
    tree = PrefixTree()
    ends: dict[tuple[int, ...], list[PrefixNode]] = {}
    holders: Counter[int] = Counter()
    for chain in chains(prompts):
        shared = tree.shared_tokens(chain)
        node, found = tree.add_request(chain, 1.0)
        assert found == shared == held(chain, holders)
        holders.update(chain)
        ends.setdefault(chain, []).append(node)
        check_agreement(tree, holders, ends)
    held_chains = [chain for chain, nodes in ends.items() for _ in nodes]
    shuffler.shuffle(held_chains)
    for chain in held_chains:
        tree.release(ends[chain].pop())
        holders.subtract(chain)
        check_agreement(tree, holders, ends)
    assert not tree._root.below


def check_agreement(
    tree: PrefixTree, holders: Counter[int], ends: dict[tuple[int, ...], list[PrefixNode]]
) -> None:
    sizes = {block: BLOCKS[n] for chain in ends for n, block in enumerate(chain)}
    assert tree.tokens == sum(sizes[block] for block, number in holders.items() if number)
    more = {block: number - 1 for block, number in holders.items() if number > 1}
    assert tree.saved == sum(sizes[block] * number for block, number in more.items())


def test_first_holder_sets_the_tokens_per_byte_of_a_block() -> None:
    tree = PrefixTree()
    tree.add_request((1, 2), 0.25)
    assert tree.add_request((1, 3), 0.5)[1] == 32
    assert (tree.tokens, tree.saved) == (32 + 32 + 64, 32)

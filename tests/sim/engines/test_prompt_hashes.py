"""Prefix hashes of simulated prompts."""

from __future__ import annotations

from proxy.core.learned.prefix_index import ENDS
from vllm_sched.sim.engines.prompt_hashes import BYTES_PER_TOKEN, prefix_hashes, token_namer


def shared_tokens(
    one: tuple[tuple[str, int], ...], other: tuple[tuple[str, int], ...], length: int = 200
) -> int:
    """Return the number of first tokens with equal names in two texts."""
    first, second = token_namer(1, one), token_namer(2, other)
    same = [first(end) == second(end) for end in range(1, length + 1)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_token_names_are_equal_up_to_the_first_different_piece() -> None:
    assert shared_tokens((), ()) == 0
    assert shared_tokens((("a", 50), ("b", 50)), (("a", 50), ("b", 20))) == 70
    assert shared_tokens((("a", 50), ("b", 50)), (("a", 50), ("c", 50))) == 50
    assert shared_tokens((("a", 50), ("b", 50)), (("a", 40), ("b", 50))) == 40
    assert shared_tokens((("a", 50), ("b", 20), ("c", 9)), (("a", 50), ("b", 20), ("c", 30))) == 79


def test_hashes_end_at_the_routers_block_ends() -> None:
    shared = (("system", ENDS[3] // BYTES_PER_TOKEN),)
    one, other = (prefix_hashes(text, shared, 10_000) for text in (1, 2))
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])
    assert len(one) == sum(end <= 10_000 * BYTES_PER_TOKEN for end in ENDS)
    assert prefix_hashes(1, (), 10_000) == ()

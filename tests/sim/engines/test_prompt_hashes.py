"""Who shares what with whom, without words."""

from __future__ import annotations

from proxy.core.learned.prefix_index import ENDS
from vllm_sched.sim.engines.prompt_hashes import BYTES_PER_TOKEN, prefix_hashes, token_namer


def alike(
    one: tuple[tuple[str, int], ...], other: tuple[tuple[str, int], ...], length: int = 200
) -> int:
    """Count the tokens up to which two texts have the same names."""
    first, second = token_namer(1, one), token_namer(2, other)
    same = [first(end) == second(end) for end in range(1, length + 1)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_texts_are_alike_as_far_as_their_pieces() -> None:
    assert alike((), ()) == 0
    assert alike((("a", 50),), (("a", 50),)) == 50
    assert alike((("a", 50),), (("b", 50),)) == 0
    assert alike((("a", 50),), (("a", 30),)) == 30
    assert alike((("a", 50), ("b", 50)), (("a", 50), ("b", 20))) == 70
    assert alike((("a", 50), ("b", 50)), (("a", 50), ("c", 50))) == 50
    assert alike((("a", 50), ("b", 50)), (("a", 40), ("b", 50))) == 40


def test_one_text_is_itself() -> None:
    shared = (("a", 50),)
    assert [token_namer(1, shared)(end) for end in range(1, 99)] == [
        token_namer(1, shared)(end) for end in range(1, 99)
    ]


def test_hashes_cut_where_the_router_cuts() -> None:
    shared = (("system", ENDS[3] // BYTES_PER_TOKEN),)
    one, other = (prefix_hashes(text, shared, 10_000) for text in (1, 2))
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])
    assert len(one) == sum(end <= 10_000 * BYTES_PER_TOKEN for end in ENDS)


def test_what_shares_nothing_is_not_hashed() -> None:
    assert prefix_hashes(1, (), 10_000) == ()

"""Prompts that begin alike: what a prefix cache gains from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from vllm_sched.bench.traffic.types import Piece, Request

# A request that comes back to a group asks something new as well.
MOST: Final = 0.9
# Groups that somebody may still come back to: the last ones opened.
ALIVE: Final = 64


def sharing(
    requests: Iterator[Request], hit: float, rng: random.Random, name: str
) -> Iterator[Request]:
    """Let requests begin alike so that `hit` of all prompt tokens were sent before.

    A request either opens a group with its whole prompt, or comes back to one of the last groups
    with as much of that group's text as fits in its own prompt; a longer one goes on from there,
    as a conversation does. It comes back whenever too few tokens have been shared so far, so the
    share is met in short runs too; lengths stay as they were. `name` keeps the groups of two
    sources apart.
    """
    heads: list[Piece] = []
    opened = shared = total = 0
    for request in requests:
        if heads and shared < hit * total:
            index = rng.randrange(len(heads))
            group, known = heads[index]
            again = int(MOST * request.prompt_tokens)
            if again <= known:
                piece = (group, again)
                shared += again
            else:
                piece = heads[index] = (group, request.prompt_tokens)
                shared += known
        else:
            piece = (f"{name}/{opened}", request.prompt_tokens)
            if len(heads) < ALIVE:
                heads.append(piece)
            else:
                heads[opened % ALIVE] = piece
            opened += 1
        total += request.prompt_tokens
        yield replace(request, shared=(piece,) if piece[1] else ())


def strangers(requests: Iterator[Request]) -> Iterator[Request]:
    """Let no two requests share anything."""
    return (replace(request, shared=()) for request in requests)

"""Prompts that share prefixes, for prefix caches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from vllm_sched.bench.traffic.types import Piece, Request

# The most of a prompt that may be shared.
MAX_SHARED_PART: Final = 0.9
# Groups that may get more requests: the last ones opened.
MAX_OPEN_GROUPS: Final = 64


def with_sharing(
    requests: Iterator[Request], hit: float, rng: random.Random, name: str
) -> Iterator[Request]:
    """Yield the requests with shared prefixes, so that `hit` of all prompt tokens were sent before.

    A request opens a group with its prompt, or shares a recent group's text while too few tokens
    are shared. `name` separates the groups of two sources.
    """
    heads: list[Piece] = []
    opened = shared = total = 0
    for request in requests:
        if heads and shared < hit * total:
            index = rng.randrange(len(heads))
            group, head = heads[index]
            again = int(MAX_SHARED_PART * request.prompt_tokens)
            piece = (group, again)
            if again > head:
                piece = heads[index] = (group, request.prompt_tokens)
            shared += min(again, head)
        else:
            piece = (f"{name}/{opened}", request.prompt_tokens)
            if len(heads) < MAX_OPEN_GROUPS:
                heads.append(piece)
            else:
                heads[opened % MAX_OPEN_GROUPS] = piece
            opened += 1
        total += request.prompt_tokens
        yield replace(request, shared=(piece,) if piece[1] else ())


def without_sharing(requests: Iterator[Request]) -> Iterator[Request]:
    return (replace(request, shared=()) for request in requests)

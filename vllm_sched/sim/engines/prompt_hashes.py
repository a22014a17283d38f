"""Texts without words: who shares what with whom, for caches and for the router's prefix index."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from proxy.core.learned.prefix_index import ENDS
from vllm_sched.bench.traffic.types import Piece

# A token of English text, as the router takes it until it knows better.
BYTES_PER_TOKEN: Final = 4
# Prompts whose hashes are kept: a search plays the same some hundred times.
KEPT: Final = 16_384


def namer(text: int, shared: tuple[Piece, ...]) -> Callable[[int], bytes]:
    """Make what names a text up to its n-th token: the same name, the same tokens.

    Texts are alike as far as they begin with pieces of the same names.
    """
    whole = sum(tokens for _, tokens in shared)

    def own(end: int) -> bytes:
        return b"%d/%d" % (text, end)

    if not whole:
        return own

    def name(end: int) -> bytes:
        if end > whole:
            return own(end)
        parts: list[Piece] = []
        left = end
        for piece, tokens in shared:
            parts.append((piece, min(tokens, left)))
            left -= tokens
            if left <= 0:
                break
        return xxh3_128_digest(repr(parts).encode())

    return name


@lru_cache(maxsize=KEPT)
def prefix_hashes(text: int, shared: tuple[Piece, ...], prompt_tokens: int) -> tuple[int, ...]:
    """Hash a prompt's blocks as the router would, were its bytes there; nothing if none is shared.

    What shares nothing would only fill the index with hashes that nobody asks for.
    """
    if not shared:
        return ()
    name = namer(text, shared)
    blocks = bisect_right(ENDS, prompt_tokens * BYTES_PER_TOKEN)
    return tuple(xxh3_64_intdigest(name(end // BYTES_PER_TOKEN)) for end in ENDS[:blocks])

"""Synthetic prompt hashes that show shared prefixes to caches and to the router's prefix index."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from proxy.core.learned.prefix_index import ENDS
from vllm_sched.bench.traffic.types import Piece

# The router's initial estimate for English text.
BYTES_PER_TOKEN: Final = 4
# Cached prompts: a search plays the same prompts some hundred times.
MAX_CACHED_PROMPTS: Final = 16_384


def token_namer(text: int, shared: tuple[Piece, ...]) -> Callable[[int], bytes]:
    """Return a function that names a text's first n tokens; equal names mean equal tokens."""
    ends: list[int] = []
    heads: list[bytes] = []
    before, whole = b"", 0
    for piece, tokens in shared:
        heads.append(b"%b%b" % (before, repr(piece).encode()))
        before = xxh3_128_digest(b"%b/%d" % (heads[-1], tokens))
        whole += tokens
        ends.append(whole)

    def name(end: int) -> bytes:
        at = bisect_left(ends, end)
        if at == len(ends):
            return b"%d/%d" % (text, end)
        return xxh3_128_digest(b"%b/%d" % (heads[at], end - (ends[at - 1] if at else 0)))

    return name


@lru_cache(maxsize=MAX_CACHED_PROMPTS)
def prefix_hashes(text: int, shared: tuple[Piece, ...], prompt_tokens: int) -> tuple[int, ...]:
    """Return the hashes of a prompt's blocks; none without shared pieces, to keep the index small.

    Block sizes are those of the router's prefix index.
    """
    if not shared:
        return ()
    name = token_namer(text, shared)
    blocks = bisect_right(ENDS, prompt_tokens * BYTES_PER_TOKEN)
    return tuple(xxh3_64_intdigest(name(end // BYTES_PER_TOKEN)) for end in ENDS[:blocks])

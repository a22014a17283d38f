"""Prompts of a given number of tokens for an endpoint with an unknown tokenizer.

The prompts are random common words. Texts with different names differ from their first word, so
that only intended prefixes are cached. Most of a prompt is cut from one long text, which is fast.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from vllm_sched.bench.traffic.types import Request

WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text().split())
HEAD_WORDS: Final = 12  # random words at the begin of each text
POOL_WORDS: Final = 1 << 16


@dataclass(frozen=True)
class Measure:
    """The tokens of words at an endpoint: `fixed + per_word * words`."""

    per_word: float = 1.0
    fixed: float = 0.0  # tokens of a template or a first token

    def words(self, tokens: int) -> int:
        return max(0, round((tokens - self.fixed) / self.per_word))


class Texts:
    """Texts by name; the same seed gives the same texts."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        pool = random.Random(f"pool/{seed}").choices(WORDS, k=POOL_WORDS)
        self._pool = " ".join(pool)
        self._begins = [0, *accumulate(len(word) + 1 for word in pool)]

    def text(self, name: object, words: int) -> str:
        rng = random.Random(f"{self.seed}/{name!r}")
        head = rng.choices(WORDS, k=HEAD_WORDS)
        if words <= HEAD_WORDS:
            return " ".join(head[:words])
        begin, left = rng.randrange(POOL_WORDS), words - HEAD_WORDS
        pieces = [" ".join(head)]
        while left:
            taken = min(left, POOL_WORDS - begin)
            pieces.append(self._pool[self._begins[begin] : self._begins[begin + taken] - 1])
            begin, left = 0, left - taken
        return " ".join(pieces)

    def prompt(self, number: int, request: Request, measure: Measure) -> str:
        """Return the prompt of request `number`, with the shared pieces first."""
        own = (_Own(number), request.prompt_tokens - request.shared_tokens)
        return self.joined([*request.shared, own], measure)

    def joined(self, pieces: Iterable[tuple[object, int]], measure: Measure) -> str:
        """Return the text of pieces (name, tokens); at least a word, because APIs need a prompt."""
        messages = []
        name: object = ""
        tokens = words_done = 0
        for name, more in pieces:
            # Rounded at the end of each piece, so that the errors of pieces do not add up.
            tokens += more
            words = measure.words(tokens) - words_done
            if words > 0:
                messages.append(self.text(name, words))
                words_done += words
        return " ".join(messages) or self.text(name, 1)


@dataclass(frozen=True)
class _Own:
    """The name of a text that only one request has."""

    number: int

"""What the generators make and the players play."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

# A text's name and how many of its first tokens are meant. Two prompts that begin with pieces of
# the same names share those tokens: what a prefix cache can gain.
Piece: TypeAlias = tuple[int | str, int]
MOST_TOKENS: Final = 100_000_000  # of a prompt or an answer: longer than any context


@dataclass(frozen=True, slots=True)
class Request:
    """One request. What follows its shared pieces is nobody else's."""

    at: float  # seconds after the start; of no meaning in a closed loop
    klass: str
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    shared: tuple[Piece, ...] = ()

    @property
    def shared_tokens(self) -> int:
        """How many tokens of the prompt come from shared pieces."""
        return sum(tokens for _, tokens in self.shared)

    def scaled(self, factor: float) -> Request:
        """Return it with lengths multiplied, none of them below one token."""
        prompt = _scaled(self.prompt_tokens, factor)
        pieces = []
        left = prompt
        for name, tokens in self.shared:
            pieces.append((name, min(left, _scaled(tokens, factor))))
            left -= pieces[-1][1]
            if not left:
                break
        return replace(
            self,
            prompt_tokens=prompt,
            output_tokens=_scaled(self.output_tokens, factor),
            shared=tuple(pieces),
        )

    def fitted(self, limit: int) -> Request:
        """Return it cut so that prompt and output are at most `limit` tokens together."""
        if self.prompt_tokens + self.output_tokens <= limit:
            return self
        output = min(self.output_tokens, max(1, limit // 2))
        prompt = max(1, min(self.prompt_tokens, limit - output))
        pieces = []
        left = prompt
        for name, tokens in self.shared:
            if not left:
                break
            pieces.append((name, min(left, tokens)))
            left -= pieces[-1][1]
        return replace(self, prompt_tokens=prompt, output_tokens=output, shared=tuple(pieces))


def _scaled(tokens: int, factor: float) -> int:
    return max(1, round(min(tokens * factor, MOST_TOKENS)))


class TrafficSource(ABC):
    """Where requests come from; the same random numbers give the same requests."""

    name: str
    rate: float  # requests per second, as published; taken where nobody asks for another
    burstiness: float = 1.0  # of the gamma gaps: 1 is Poisson, less is burstier
    timed: bool = False  # whether `at` of what it makes is to be kept
    count: int | None = None  # how many there are; None without end

    @abstractmethod
    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Make requests: without end, or as many as a trace holds."""

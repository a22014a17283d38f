"""Types that traffic sources make and clients and simulators play."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

# A text's name and the number of its first tokens that are used. Prompts that begin with pieces of
# the same names share these tokens in a prefix cache.
Piece: TypeAlias = tuple[int | str, int]
MAX_TOKENS: Final = 100_000_000  # of a prompt or an output: longer than any context


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Its text after the shared pieces is unique."""

    at: float  # seconds after the start; not used in a closed loop
    klass: str
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    shared: tuple[Piece, ...] = ()
    session: str = ""  # name of the session, in its sub-agents' turns too

    @property
    def shared_tokens(self) -> int:
        """The number of prompt tokens in shared pieces."""
        return sum(tokens for _, tokens in self.shared)

    def scaled(self, factor: float) -> Request:
        """Return the request with lengths multiplied, each at least one token."""
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
        """Return the request shortened to `limit` tokens in all."""
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
    return max(1, round(min(tokens * factor, MAX_TOKENS)))


class TrafficSource(ABC):
    """A source of requests; the same random numbers give the same requests."""

    name: str
    rate: float  # requests per second, as published; the default rate
    burstiness: float = 1.0  # of the gamma gaps: 1 is Poisson, less is burstier
    timed: bool = False  # whether the requests' `at` is used
    count: int | None = None  # number of requests; None if endless

    @abstractmethod
    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Yield requests; endless unless the source is a trace."""

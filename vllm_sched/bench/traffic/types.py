"""Types that traffic sources make and clients and simulators play."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

# A text's name and the number of its first tokens that are used. Prompts that begin with pieces of
# the same names share these tokens in a prefix cache.
Piece: TypeAlias = tuple[int | str, int]
MAX_TOKENS: Final = 100_000_000  # of a prompt or an output: longer than any context


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: the conversation so far and `new_tokens` more."""

    new_tokens: int  # tool results or a user's text
    output_tokens: int
    think_s: float = 0.0  # between the end of the last answer and this request
    compacts: bool = False  # the new tokens replace the conversation, except the shared prefix
    forks: tuple[Session, ...] = ()  # sub-agents after the answer; the next turn waits for them

    def scaled(self, factor: float) -> Turn:
        return replace(
            self,
            new_tokens=_scaled(self.new_tokens, factor),
            output_tokens=_scaled(self.output_tokens, factor),
            forks=tuple(fork.scaled(factor) for fork in self.forks),
        )


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation of an agent or a user, or of a sub-agent."""

    name: str  # unique in its source
    turns: tuple[Turn, ...]
    shared: tuple[Piece, ...] = ()  # prefix before the first turn's new tokens
    fresh: bool = False  # a sub-agent that does not extend its parent's conversation

    def scaled(self, factor: float) -> Session:
        """Return the session with lengths multiplied, each at least one token."""
        return replace(
            self,
            turns=tuple(turn.scaled(factor) for turn in self.turns),
            shared=tuple((name, _scaled(tokens, factor)) for name, tokens in self.shared),
        )


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
    begins: Session | None = None  # the session that this turn begins
    turn: int = 0
    context_tokens: int = 0  # prompt tokens of earlier prompts and answers of the session

    @property
    def shared_tokens(self) -> int:
        return sum(tokens for _, tokens in self.shared)

    def scaled(self, factor: float) -> Request:
        """Return the request with lengths multiplied, each at least one token."""
        prompt = _scaled(self.prompt_tokens, factor)
        shared = ((name, _scaled(tokens, factor)) for name, tokens in self.shared)
        return replace(
            self,
            prompt_tokens=prompt,
            output_tokens=_scaled(self.output_tokens, factor),
            shared=_first_tokens(shared, prompt),
            begins=self.begins and self.begins.scaled(factor),
        )

    def fit_to(self, limit: int) -> Request:
        if self.prompt_tokens + self.output_tokens <= limit:
            return self
        output = min(self.output_tokens, max(1, limit // 2))
        prompt = max(1, min(self.prompt_tokens, limit - output))
        shared = _first_tokens(self.shared, prompt)
        return replace(self, prompt_tokens=prompt, output_tokens=output, shared=shared)


def _first_tokens(pieces: Iterable[Piece], tokens: int) -> tuple[Piece, ...]:
    kept = []
    for name, size in pieces:
        if tokens <= 0:
            break
        kept.append((name, min(size, tokens)))
        tokens -= size
    return tuple(kept)


def _scaled(tokens: int, factor: float) -> int:
    return max(1, round(min(tokens * factor, MAX_TOKENS)))


class TrafficSource(ABC):
    """A source of requests; the same random numbers give the same requests."""

    name: str
    rate: float  # requests per second, as published; the default rate
    burstiness: float = 1.0  # of the gamma gaps: 1 is Poisson, less is burstier
    timed: bool = False  # whether the requests' `at` is used
    count: int | None = None  # number of requests, or of sessions; None if endless
    has_sessions: bool = False  # whether each request begins a session

    @abstractmethod
    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Yield requests; endless unless the source is a trace."""

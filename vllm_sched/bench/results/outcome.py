"""The outcome of one request, in a measurement or in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from vllm_sched.bench.traffic.types import Request


@dataclass(slots=True)
class Outcome:
    """One request's history, in seconds after the start.

    Latencies count from `at`, the planned time; latencies from `sent` would leave out exactly the
    waits under load.
    """

    at: float
    klass: str
    prompt_tokens: int  # as requested; replaced by the worker's own count
    output_tokens: int  # as requested
    tenant: str = ""
    sent: float = 0.0
    ticks: list[float] = field(default_factory=list)  # one per event with tokens
    completed: int = 0  # output tokens, counted by the worker
    worker: str = ""  # the serving worker, if a router names it
    error: str = ""
    interrupted: bool = False  # by the user; not a failure
    session: str = ""
    turn: int = 0  # in the session, or in the sub-agent
    context_tokens: int = 0  # of the prompt, in earlier prompts and answers of the session
    cached_tokens: int | None = None  # of the prompt, if the worker reports it
    name: str = ""  # the X-Request-Id for the worker

    @classmethod
    def from_request(cls, request: Request, at: float) -> Self:
        """Return the outcome of a request that is planned for this time."""
        return cls(
            at,
            request.klass,
            request.prompt_tokens,
            request.output_tokens,
            request.tenant,
            session=request.session,
            turn=request.turn,
            context_tokens=request.context_tokens,
        )

    @property
    def good(self) -> bool:
        return not self.error and not self.interrupted

    @property
    def first_token(self) -> float | None:
        return self.ticks[0] if self.ticks else None

    @property
    def end(self) -> float:
        """When the last token arrived; the sending time without tokens."""
        return self.ticks[-1] if self.ticks else self.sent

    @property
    def ttft(self) -> float:
        return self.ticks[0] - self.at if self.ticks else 0.0

    @property
    def latency(self) -> float:
        return self.end - self.at

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.completed < 2 or not self.ticks:
            return None
        return (self.ticks[-1] - self.ticks[0]) / (self.completed - 1)

    @property
    def itls(self) -> list[float]:
        return [later - sooner for sooner, later in pairwise(self.ticks)]

    @property
    def late(self) -> float:
        return self.sent - self.at

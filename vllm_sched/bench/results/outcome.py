"""What happened to one request, in a measurement or in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Outcome:
    """One request's life; times in seconds after the start.

    Latencies count from `at`, when the request was meant to be sent. A client or a connection that
    is late thus makes latencies worse, not better: whoever counts from `sent` under load leaves
    out just the waits that hurt.
    """

    at: float
    klass: str
    prompt_tokens: int  # asked for; replaced by the worker's own count where it gives one
    output_tokens: int  # asked for
    tenant: str = ""
    sent: float = 0.0
    ticks: list[float] = field(default_factory=list)  # one per event that carried tokens
    completed: int = 0  # output tokens, by the worker's own count
    worker: str = ""  # who served it, where a router says
    error: str = ""
    interrupted: bool = False  # by the user, who is not to be told of a failure

    @property
    def good(self) -> bool:
        """Whether it was answered whole."""
        return not self.error and not self.interrupted

    @property
    def end(self) -> float:
        """When the last token came; when it was sent if none did."""
        return self.ticks[-1] if self.ticks else self.sent

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.ticks[0] - self.at if self.ticks else 0.0

    @property
    def latency(self) -> float:
        """Time to last token."""
        return self.end - self.at

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where there is none."""
        if self.completed < 2 or not self.ticks:
            return None
        return (self.ticks[-1] - self.ticks[0]) / (self.completed - 1)

    @property
    def itls(self) -> list[float]:
        """Gaps between tokens, as they can be seen from outside."""
        return [later - sooner for sooner, later in pairwise(self.ticks)]

    @property
    def late(self) -> float:
        """How long after its time the client sent it."""
        return self.sent - self.at

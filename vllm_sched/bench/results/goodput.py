"""Goodput: requests per second that meet their latency targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.errors import UsageError


@dataclass(frozen=True)
class Targets:
    """Limits in seconds; None means no limit.

    `itl` limits a request's longest gap. vLLM's benchmark lacks this, and a mean (`tpot`) can't
    show a stall.
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2el: float | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in self.as_ms().values())

    def is_met_by(self, outcome: Outcome) -> bool:
        """Return whether a request completed in time; with a single token, TPOT is 0."""
        if not outcome.good:
            return False
        gap = 0.0 if self.itl is None else max(outcome.itls, default=0.0)
        paced = self.is_paced(outcome.tpot or 0.0, gap)
        return paced and self.is_in_time(outcome.ttft, outcome.latency)

    def is_paced(self, tpot: float, gap: float) -> bool:
        """Return whether tokens come in time after the first; `gap` is the longest."""
        return (self.tpot is None or tpot <= self.tpot) and (self.itl is None or gap <= self.itl)

    def is_in_time(self, ttft: float, latency: float) -> bool:
        """Return whether the first and the last token come in time."""
        return (self.ttft is None or ttft <= self.ttft) and (
            self.e2el is None or latency <= self.e2el
        )

    def as_ms(self) -> dict[str, float | None]:
        targets = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: None if value is None else value * 1000 for name, value in targets.items()}


def parse(pairs: Sequence[str]) -> Targets:
    """Parse targets such as `ttft:3000 itl:300`, in milliseconds."""
    names = [field.name for field in fields(Targets)]
    targets: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in names:
            raise UsageError(f"--goodput {pair}: unknown target; use one of: {', '.join(names)}")
        try:
            targets[name] = float(value) / 1000
        except ValueError:
            raise UsageError(
                f"--goodput {pair}: {value!r} is not a number of milliseconds; write {name}:500"
            ) from None
        if not 0 < targets[name] < float("inf"):
            raise UsageError(f"--goodput {pair}: a target must be above 0 ms; write {name}:500")
    return Targets(**targets)

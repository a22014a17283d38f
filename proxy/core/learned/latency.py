"""Latency of one worker, learned from observations.

    time to first token = fixed + seconds per prefill token x tokens, its own and those ahead
    time of a step      = base  + seconds per decoding sequence x sequences

Long requests ahead of a short one count by `long_share`, because shorts may overtake. Cached tokens
count by `evicted_share`, because of evictions.

Idea: multiply each part by the bounded ratio of observation to prediction, to the power of its
share.

Cost: a few exponentials per observation.

How it fails: attention makes late tokens dearer, so shorts on mixed workers are predicted too slow.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

# First values; only the order of magnitude matters.
FIXED_S, TOKEN_S = 0.02, 1e-4
STEP_S, SEQUENCE_S = 0.02, 2e-4
MIN_VALUE = 1e-9
MIN_SHARE = 0.01
EVICTED_SHARE = 0.05
MAX_LOG_RATIO = log(8.0)
MIN_LEARNING_RATE = 0.08
LEARNING_INTERVAL_S, UNTHROTTLED_OBSERVATIONS = 0.01, 50  # the interval applies after these
SLOW_LEARNING_RATE = 0.1
PARTS = ("fixed_s", "token_s", "long_share", "evicted_share", "base_s", "sequence_s")


class PrefillWork(NamedTuple):
    """Prompt tokens that were computed before a first token."""

    tokens: float  # uncached ones of the request, and those ahead of it
    long_tokens: float = 0.0  # ahead of a short request, of long ones
    cached_tokens: float = 0.0  # of the request, as predicted


class LatencyModel:
    __slots__ = (
        "base_s", "evicted_share", "first_token_learnable_at", "fixed_s", "handover_tokens",
        "long_share", "prefills", "seen_at", "sequence_s", "steps", "steps_learnable_at", "token_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.fixed_s = FIXED_S
        self.token_s = TOKEN_S
        self.long_share = 1.0
        self.evicted_share = EVICTED_SHARE
        self.base_s = STEP_S
        self.sequence_s = SEQUENCE_S
        self.handover_tokens = 0.0  # mean prompt of hand-overs
        self.prefills = 0.0  # weight
        self.steps = 0.0
        self.seen_at = 0.0  # last first token
        self.first_token_learnable_at = 0.0
        self.steps_learnable_at = 0.0

    def step_s(self, sequences: float) -> float:
        return self.base_s + self.sequence_s * sequences

    def first_token_s(self, tokens: float, long_tokens: float = 0.0, cached: float = 0.0) -> float:
        """Predict the time to first token; the arguments are those of `PrefillWork`."""
        counted = tokens + self.long_share * long_tokens + self.evicted_share * cached
        return self.fixed_s + self.token_s * counted

    def learn_first_token(
        self, work: PrefillWork, seconds: float, now: float, weight: float = 1.0
    ) -> None:
        tokens, long_tokens, cached = work
        self.prefills += weight
        self.seen_at = now
        if self.prefills > UNTHROTTLED_OBSERVATIONS:
            self.first_token_learnable_at = now + LEARNING_INTERVAL_S
        predicted = self.first_token_s(tokens, long_tokens, cached)
        blame = _log_error(predicted, seconds, weight, self.prefills) / predicted
        flat, token_s = self.fixed_s, self.token_s
        if long_tokens:
            self.long_share = _share(
                self.long_share, blame * token_s * self.long_share * long_tokens
            )
        if cached:
            self.evicted_share = _share(
                self.evicted_share, blame * token_s * self.evicted_share * cached
            )
        self.token_s = max(token_s * exp(blame * token_s * tokens), MIN_VALUE)
        self.fixed_s = max(flat * exp(blame * flat), MIN_VALUE)

    def learn_steps(
        self, sequences: float, seconds: float, now: float, weight: float = 1.0
    ) -> None:
        self.steps += weight
        if self.steps > UNTHROTTLED_OBSERVATIONS:
            self.steps_learnable_at = now + LEARNING_INTERVAL_S
        predicted = self.step_s(sequences)
        blame = _log_error(predicted, seconds, weight, self.steps) / predicted
        grown = self.sequence_s * sequences
        self.sequence_s = max(self.sequence_s * exp(blame * grown), MIN_VALUE)
        self.base_s = max(self.base_s * exp(blame * (predicted - grown)), MIN_VALUE)

    def learn_total(
        self, work: PrefillWork, sequences: float, steps: int, seconds: float, now: float
    ) -> None:
        """Learn from a total time, split as predicted."""
        first, step = self.first_token_s(*work), self.step_s(sequences)
        whole = first + steps * step
        ratio, share = seconds / whole, first / whole
        self.learn_first_token(work, first * ratio, now, share)
        if steps:
            self.learn_steps(sequences, step * ratio, now, 1.0 - share)

    def learn_cached(self, cached_share: float) -> None:
        self.evicted_share = _share(
            self.evicted_share + SLOW_LEARNING_RATE * (1.0 - cached_share - self.evicted_share), 0.0
        )

    def learn_handover_tokens(self, tokens: int) -> None:
        gain = SLOW_LEARNING_RATE if self.handover_tokens else 1.0
        self.handover_tokens += gain * (tokens - self.handover_tokens)

    def adopt(self, other: LatencyModel, share: float = 1.0) -> None:
        """Move towards another model."""
        for part in PARTS:
            own_value, other_value = getattr(self, part), getattr(other, part)
            setattr(self, part, own_value ** (1.0 - share) * other_value**share)


def _log_error(predicted: float, seconds: float, weight: float, seen: float) -> float:
    ratio = log(max(seconds, MIN_VALUE) / predicted)
    rate = max(weight / max(seen, 1.0), MIN_LEARNING_RATE * weight)
    return rate * min(max(ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)


def _share(share: float, move: float) -> float:
    return min(max(share * exp(move), MIN_SHARE), 1.0)

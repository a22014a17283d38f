"""How fast a worker is, learnt from what it did.

Two forms are assumed, each of a fixed part and parts that grow:

    time to first token = fixed + seconds per prefill token x tokens, its own and those ahead
    time of a step      = base  + seconds per decoding sequence x sequences

Of a long prompt's tokens ahead of a short one only a share counts, `passing`: a worker may let
shorts past, as vllm-sched's `long_prompt` policy does, and then a busy long worker is a good place
for them. Whether it does is learnt like the rest.

Idea: compare each observation with its prediction, and multiply each part by the ratio to the power
of that part's share in the prediction: what made up most of the time takes most of the blame. Parts
stay positive, short and long requests teach their own part, and a bounded ratio keeps an outlier
(the compilation behind a first request) from doing lasting harm.

Cost: a few exponentials per observation, none per prediction. How it fails: attention makes tokens
far into a prompt dearer than the first ones, so a worker of mixed lengths is predicted too slow for
shorts, equally on all like it; two parts that always grow together can't be told apart, and need
not be.
"""

from __future__ import annotations

from math import exp, log

# Before anything was seen. Only their order of magnitude matters, and not for long.
FIXED_S, TOKEN_S = 0.02, 1e-4
STEP_S, EACH_S = 0.02, 2e-4
LEAST = 1e-9
LEAST_PASSING = 0.02
MOST_BLAME = log(8.0)
LEAST_RATE = 0.08  # of an observation's say, once many were seen
REST_S, YOUNG = 0.01, 50  # after so many observations, a hundred a second are enough


class Pace:
    """One worker's."""

    __slots__ = (
        "base_s",
        "each_s",
        "end_due",
        "first_due",
        "fixed_s",
        "passing",
        "prefills",
        "seen_at",
        "steps",
        "token_s",
    )

    def __init__(self) -> None:
        self.fixed_s = FIXED_S
        self.token_s = TOKEN_S
        self.passing = 1.0
        self.base_s = STEP_S
        self.each_s = EACH_S
        self.prefills = 0.0  # how much was seen of each form
        self.steps = 0.0
        self.seen_at = 0.0  # when a first token was last learnt from
        self.first_due = 0.0  # from when on the next first token, and the next end, may teach it
        self.end_due = 0.0

    def step_s(self, sequences: float) -> float:
        """Predict the time of a step with so many sequences decoding."""
        return self.base_s + self.each_s * sequences

    def first_token_s(self, tokens: float, behind_long: float = 0.0) -> float:
        """Predict the time to a first token, with so many tokens to prefill until then."""
        return self.fixed_s + self.token_s * (tokens + self.passing * behind_long)

    def saw_first_token(
        self, tokens: float, behind_long: float, seconds: float, now: float, weight: float = 1.0
    ) -> None:
        """Learn from a time to first token."""
        self.prefills += weight
        self.seen_at = now
        if self.prefills > YOUNG:
            self.first_due = now + REST_S
        predicted = self.first_token_s(tokens, behind_long)
        blame = _blame(predicted, seconds, weight, self.prefills) / predicted
        stood = self.passing * self.token_s * behind_long
        if stood:
            self.passing = min(max(self.passing * exp(blame * stood), LEAST_PASSING), 1.0)
        grown = self.token_s * tokens
        self.token_s = max(self.token_s * exp(blame * grown), LEAST)
        self.fixed_s = max(self.fixed_s * exp(blame * (predicted - grown - stood)), LEAST)

    def saw_steps(self, sequences: float, seconds: float, now: float, weight: float = 1.0) -> None:
        """Learn from the mean time of a request's steps."""
        self.steps += weight
        if self.steps > YOUNG:
            self.end_due = now + REST_S
        predicted = self.step_s(sequences)
        blame = _blame(predicted, seconds, weight, self.steps) / predicted
        grown = self.each_s * sequences
        self.each_s = max(self.each_s * exp(blame * grown), LEAST)
        self.base_s = max(self.base_s * exp(blame * (predicted - grown)), LEAST)

    def saw_whole(
        self,
        tokens: float,
        behind_long: float,
        sequences: float,
        steps: int,
        seconds: float,
        now: float,
    ) -> None:
        """Learn from a request of which only the end was seen: each form takes its share."""
        first, step = self.first_token_s(tokens, behind_long), self.step_s(sequences)
        whole = first + steps * step
        ratio, share = seconds / whole, first / whole
        self.saw_first_token(tokens, behind_long, first * ratio, now, share)
        if steps:
            self.saw_steps(sequences, step * ratio, now, 1.0 - share)

    def adopt(self, other: Pace, share: float = 1.0) -> None:
        """Move towards another's: all the way for a worker of which nothing is known."""
        for part in ("fixed_s", "token_s", "passing", "base_s", "each_s"):
            mine, theirs = getattr(self, part), getattr(other, part)
            setattr(self, part, mine ** (1.0 - share) * theirs**share)


def _blame(predicted: float, seconds: float, weight: float, seen: float) -> float:
    """How far to move, as a logarithm."""
    ratio = log(max(seconds, LEAST) / predicted)
    rate = max(weight / max(seen, 1.0), LEAST_RATE * weight)
    return rate * min(max(ratio, -MOST_BLAME), MOST_BLAME)

"""How fast a worker is, learnt from what it did.

Two forms are assumed, each of a fixed part and parts that grow:

    time to first token = fixed + seconds per prefill token x tokens, its own and those ahead
    time of a step      = base  + seconds per decoding sequence x sequences

Two kinds of tokens count for a share only, which is learnt like the rest. Those of longs ahead of
a short count for `passing`: a worker may let shorts past, as vllm-sched's `long_prompt` policy
does, and then a busy long worker is a good place for them. Those of its own that the worker was
sent before count for `missing`: it may have evicted them, or keep no cache at all, and must not
drown in prompts that were thought to cost nothing.

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
LEAST_SHARE = 0.01
MISSING = 0.05
MOST_BLAME = log(8.0)
LEAST_RATE = 0.08  # of an observation's say, once many were seen
REST_S, YOUNG = 0.01, 50  # after so many observations, a hundred a second are enough
SLOWLY = 0.1
PARTS = ("fixed_s", "token_s", "passing", "missing", "base_s", "each_s")


class LatencyModel:
    """One worker's."""

    __slots__ = (
        "base_s",
        "each_s",
        "end_due",
        "first_due",
        "fixed_s",
        "length",
        "missing",
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
        self.missing = MISSING
        self.base_s = STEP_S
        self.each_s = EACH_S
        self.length = 0.0  # of a prompt that it was handed lately, in tokens; 0 = it had none
        self.prefills = 0.0  # how much was seen of each form
        self.steps = 0.0
        self.seen_at = 0.0  # when a first token was last learnt from
        self.first_due = 0.0  # from when on the next first token, and the next end, may teach it
        self.end_due = 0.0

    def step_s(self, sequences: float) -> float:
        """Predict the time of a step with so many sequences decoding."""
        return self.base_s + self.each_s * sequences

    def first_token_s(self, tokens: float, behind: float = 0.0, cached: float = 0.0) -> float:
        """Predict the time to a first token.

        With so many tokens to prefill until then, those of longs ahead (`behind`) and those that
        should be cached apart.
        """
        counted = tokens + self.passing * behind + self.missing * cached
        return self.fixed_s + self.token_s * counted

    def saw_first_token(
        self,
        tokens: float,
        behind: float,
        cached: float,
        seconds: float,
        now: float,
        weight: float = 1.0,
    ) -> None:
        """Learn from a time to first token."""
        self.prefills += weight
        self.seen_at = now
        if self.prefills > YOUNG:
            self.first_due = now + REST_S
        predicted = self.first_token_s(tokens, behind, cached)
        blame = _blame(predicted, seconds, weight, self.prefills) / predicted
        flat, token_s = self.fixed_s, self.token_s
        if behind:
            self.passing = _share(self.passing, blame * token_s * self.passing * behind)
        if cached:
            self.missing = _share(self.missing, blame * token_s * self.missing * cached)
        self.token_s = max(token_s * exp(blame * token_s * tokens), LEAST)
        self.fixed_s = max(flat * exp(blame * flat), LEAST)

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
        behind: float,
        cached: float,
        sequences: float,
        steps: int,
        seconds: float,
        now: float,
    ) -> None:
        """Learn from a request of which only the end was seen: each form takes its share."""
        first, step = self.first_token_s(tokens, behind, cached), self.step_s(sequences)
        whole = first + steps * step
        ratio, share = seconds / whole, first / whole
        self.saw_first_token(tokens, behind, cached, first * ratio, now, share)
        if steps:
            self.saw_steps(sequences, step * ratio, now, 1.0 - share)

    def saw_cached(self, had: float) -> None:
        """Learn what share of the tokens that should be cached was, where a worker says so."""
        self.missing = _share(self.missing + SLOWLY * (1.0 - had - self.missing), 0.0)

    def saw_length(self, tokens: int) -> None:
        """Note how long the prompts are by which it is known."""
        self.length += (tokens - self.length) * (SLOWLY if self.length else 1.0)

    def adopt(self, other: LatencyModel, share: float = 1.0) -> None:
        """Move towards another's: all the way for a worker of which nothing is known."""
        for part in PARTS:
            mine, theirs = getattr(self, part), getattr(other, part)
            setattr(self, part, mine ** (1.0 - share) * theirs**share)


def _blame(predicted: float, seconds: float, weight: float, seen: float) -> float:
    """How far to move, as a logarithm."""
    ratio = log(max(seconds, LEAST) / predicted)
    rate = max(weight / max(seen, 1.0), LEAST_RATE * weight)
    return rate * min(max(ratio, -MOST_BLAME), MOST_BLAME)


def _share(share: float, move: float) -> float:
    return min(max(share * exp(move), LEAST_SHARE), 1.0)

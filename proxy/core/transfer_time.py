"""How long a KV transfer takes, learnt from what was seen.

    seconds = fixed + seconds per token x tokens

Seen is the time from when the decode leg was sent to its first token, less one step, which it would
have taken anyhow. Idea and method are those of `predict`: each observation is compared with its
prediction, and what made up most of the time takes most of the blame, within bounds, so that the
handshake behind a first transfer does no lasting harm.

Cost: two exponentials per observation. How it fails: one pair of workers on a slow link and one on
a fast one are taken for two of middling speed.
"""

from __future__ import annotations

from math import exp, log

# Before anything was seen: a handshake is done, and the network is decent.
FIXED_S, TOKEN_S = 0.01, 1e-6
LEAST = 1e-9
MOST_BLAME = log(4.0)
LEAST_RATE = 0.06  # of an observation's say, once many were seen


class TransferTime:
    """One model's."""

    __slots__ = ("fixed_s", "seen", "token_s")

    def __init__(self) -> None:
        self.fixed_s = FIXED_S
        self.token_s = TOKEN_S
        self.seen = 0

    def seconds(self, tokens: float) -> float:
        """Predict the transfer of so many tokens."""
        return self.fixed_s + self.token_s * tokens

    def saw(self, tokens: float, seconds: float) -> None:
        """Learn from a transfer."""
        self.seen += 1
        predicted = self.seconds(tokens)
        ratio = log(max(seconds, LEAST) / predicted)
        rate = max(1.0 / self.seen, LEAST_RATE)
        blame = rate * min(max(ratio, -MOST_BLAME), MOST_BLAME) / predicted
        fixed, grown = self.fixed_s, self.token_s * tokens
        self.fixed_s = max(fixed * exp(blame * fixed), LEAST)
        self.token_s = max(self.token_s * exp(blame * grown), LEAST)

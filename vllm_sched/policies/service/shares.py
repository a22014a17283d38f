"""The parts of one step's tokens that groups of prompts share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

NO_RANK: Final = (math.inf, math.inf)  # no rank is between these


@dataclass(slots=True)
class Allowance:
    """Tokens of one step that a group of prompts shares; None = no limit."""

    left: int | None

    def limit(self, tokens: int) -> int:
        return tokens if self.left is None else min(tokens, max(self.left, 0))

    def add(self, tokens: int) -> None:
        """Add tokens, or charge them if negative."""
        if self.left is not None:
            self.left += tokens


@dataclass(slots=True)
class StepShares:
    """The allowances of one step, each None until it is known."""

    batch_share: int
    batch: Allowance | None = None
    overdue: Allowance | None = None  # prompts that were admitted for their wait
    # Prompts in prefill while a request of a better rank enters.
    others: Allowance | None = None
    others_between: tuple[float, float] = NO_RANK  # ranks that the allowance limits
    charged: list[Allowance] = field(default_factory=list)  # by the last chunk

    def charge(self, allowance: Allowance, tokens: int) -> int:
        allowance.add(-tokens)
        self.charged.append(allowance)
        return tokens

    def take_back(self, tokens: int) -> None:
        for allowance in self.charged:
            allowance.add(tokens)

"""The parts of one step's tokens that groups of prompts share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

NO_LIMIT: Final = sys.maxsize
NO_RANK: Final = (math.inf, math.inf)  # no rank is between these


@dataclass(slots=True)
class StepShares:
    """The tokens of one step that are left to each group."""

    batch_share: int
    # Prefills ranked between these are limited while a newcomer of the better rank enters.
    limited_ranks: tuple[float, float] = NO_RANK
    _left: dict[str, int] = field(default_factory=dict)  # of groups that took tokens
    _charged: list[str] = field(default_factory=list)  # groups of the last chunk

    def begin_chunk(self) -> None:
        self._charged.clear()

    def remaining(self, group: str, share: Callable[[], int]) -> int:
        """Return the tokens left; `share` returns those of the step."""
        if group not in self._left:
            self._left[group] = share()
        return max(self._left[group], 0)

    def charge(self, group: str, tokens: int) -> int:
        self._left[group] -= tokens
        self._charged.append(group)
        return tokens

    def take_back(self, tokens: int) -> None:
        for group in self._charged:
            self._left[group] += tokens

"""Published traces as tables of quantiles.

Azure 2023: the traces published with Splitwise (conversation and code; lengths, rates and the
coefficient of variation of the gaps). Mooncake: the traces published with the paper (FAST '25),
with the share of prompt tokens that an unlimited prefix cache would hold. Input and output lengths
are drawn independently.

ShareGPT: means and limits are those of vLLM's serving benchmark with its default seed (1,000
prompts with 217,393 prompt and about 200,000 output tokens; prompts up to 1,024 tokens, 2,048 with
the output). The quantiles are ours and fit these.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_sched.bench.traffic.prefixes import with_sharing
from vllm_sched.bench.traffic.types import Request, TrafficSource

PERCENTS: Final = (5, 25, 50, 75, 90, 95, 99)
# The unpublished ends continue the table's slope, up to this factor.
MAX_TAIL_RATIO: Final = 1.5


class Quantiles:
    """A distribution given by a few quantiles, with geometric interpolation.

    The logarithm of lengths is uniform between two quantiles. Means are within a few percent of the
    published ones; a lognormal through p50 and p99 misses them by half.
    """

    def __init__(self, *values: float, percents: tuple[int, ...] = PERCENTS) -> None:
        """Take the values at `percents`, ascending."""
        low = max(1.0, values[0] ** 2 / values[1])
        high = values[-1] * min(MAX_TAIL_RATIO, values[-1] / values[-2])
        self._at = (0.0, *(percent / 100 for percent in percents), 1.0)
        self._values = (low, *values, high)
        self._logs = tuple(math.log(value) for value in self._values)

    def at(self, share: float) -> int:
        above = min(bisect_right(self._at, share), len(self._at) - 1)
        left, right = self._at[above - 1], self._at[above]
        low, high = self._logs[above - 1], self._logs[above]
        return max(1, round(math.exp(low + (high - low) * (share - left) / (right - left))))

    @property
    def mean(self) -> float:
        """The mean before rounding."""
        total = 0.0
        for i in range(len(self._at) - 1):
            low, high = self._values[i], self._values[i + 1]
            logs = self._logs[i + 1] - self._logs[i]
            total += (self._at[i + 1] - self._at[i]) * ((high - low) / logs if logs else low)
        return total


@dataclass(frozen=True, kw_only=True)
class Table(TrafficSource):
    name: str
    rate: float
    burstiness: float
    prompt: Quantiles
    output: Quantiles
    prefix_hit: float = 0.0

    def requests(self, rng: random.Random) -> Iterator[Request]:
        lengths = self._lengths(rng)
        if not self.prefix_hit:
            return lengths
        return with_sharing(lengths, self.prefix_hit, random.Random(rng.random()), self.name)

    def _lengths(self, rng: random.Random) -> Iterator[Request]:
        while True:
            prompt, output = self.prompt.at(rng.random()), self.output.at(rng.random())
            yield Request(0.0, self.name, prompt, output)


def _burstiness(cv: float) -> float:
    return 1 / cv**2


TABLES: Final = {
    table.name: table
    for table in (
        Table(
            name="azure-conv",
            rate=5.5,
            burstiness=_burstiness(1.1),
            prompt=Quantiles(181, 396, 1020, 1189, 2734, 4083, 4142),
            output=Quantiles(41, 85, 129, 395, 424, 451, 601),
        ),
        Table(
            name="azure-code",
            rate=2.6,
            burstiness=_burstiness(13),
            prompt=Quantiles(75, 578, 1469, 2744, 5188, 7303, 7436),
            output=Quantiles(6, 9, 13, 24, 55, 90, 251),
        ),
        Table(
            name="mooncake-conv",
            rate=3.4,
            burstiness=1.0,
            prompt=Quantiles(901, 2306, 6909, 15367, 27367, 39550, 85400),
            output=Quantiles(10, 156, 350, 472, 597, 698, 1119),
            prefix_hit=0.37,
        ),
        Table(
            name="mooncake-synthetic",
            rate=3.4,  # not published; that of the conversation trace
            burstiness=1.0,
            prompt=Quantiles(22, 277, 11587, 23175, 38611, 48905, 66456),
            output=Quantiles(2, 11, 69, 250, 389, 519, 768),
        ),
        Table(
            name="sharegpt-like",
            rate=4.0,  # ours: the data set has no times
            burstiness=1.0,
            prompt=Quantiles(9, 20, 74, 340, 680, 840, 980),
            output=Quantiles(8, 38, 143, 320, 480, 580, 780),
        ),
    )
}

"""Sources with no distribution: one length, and the scene that longs make for shorts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.traffic.types import MOST_TOKENS, Request, TrafficSource
from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

LENGTHS: Final = re.compile(r"(\d{1,9})x(\d{1,9})")


class Fixed(TrafficSource):
    """Every request alike: `3000x100` reads 3,000 tokens and writes 100."""

    rate = 1.0

    def __init__(self, name: str) -> None:
        """Read the lengths from the name."""
        found = LENGTHS.fullmatch(name)
        self.name = name
        self.prompt, self.output = (int(each) for each in found.groups()) if found else (0, 0)
        if not all(1 <= each <= MOST_TOKENS for each in (self.prompt, self.output)):
            raise UsageError(
                f"{name}: PROMPTxOUTPUT takes two numbers of tokens, each 1 to {MOST_TOKENS:,}"
            )

    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Repeat the one request; there is nothing to draw from `rng`."""
        del rng
        while True:
            yield Request(0.0, self.name, self.prompt, self.output)


class LongBlocksShort(TrafficSource):
    """Two long prompts at once, eight short ones on their heels, again every six seconds.

    The same scene as `vllm-sched compare` plays in rounds. At a rate of somebody's choosing the
    same lengths come one by one, every fifth of them long.
    """

    name = "long-blocks-short"
    timed = True
    every_s = 6.0
    longs, long_tokens = 2, 12_000
    shorts, short_tokens = 8, 100
    output_tokens = 16
    first_short_s, gap_s = 0.3, 0.15
    rate = (longs + shorts) / every_s

    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Play the scene over and over; nothing in it is left to chance."""
        del rng
        start = 0.0
        while True:
            for _ in range(self.longs):
                yield Request(start, "long", self.long_tokens, self.output_tokens)
            for i in range(self.shorts):
                at = start + self.first_short_s + i * self.gap_s
                yield Request(round(at, 6), "short", self.short_tokens, self.output_tokens)
            start += self.every_s

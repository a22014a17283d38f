"""Sources without a distribution: a fixed length, and long prompts that block short ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Final

from vllm_sched.bench.traffic.types import MAX_TOKENS, Request, TrafficSource
from vllm_sched.errors import UsageError

LENGTHS: Final = re.compile(r"(\d{1,9})x(\d{1,9})")


class Fixed(TrafficSource):
    """Equal requests: `3000x100` has 3,000 prompt tokens and 100 output tokens."""

    rate = 1.0

    def __init__(self, name: str) -> None:
        match = LENGTHS.fullmatch(name)
        self.name = name
        self.prompt, self.output = (int(group) for group in match.groups()) if match else (0, 0)
        if not all(1 <= tokens <= MAX_TOKENS for tokens in (self.prompt, self.output)):
            raise UsageError(
                f"{name}: PROMPTxOUTPUT takes two numbers of tokens, each 1 to {MAX_TOKENS:,}"
            )

    def requests(self, rng: random.Random) -> Iterator[Request]:
        del rng
        while True:
            yield Request(0.0, self.name, self.prompt, self.output)


class LongBlocksShort(TrafficSource):
    """Two long prompts at once, then eight short ones, every six seconds.

    `vllm-sched compare` plays the same requests in rounds. At a given rate they arrive one by one,
    and every fifth is long.
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
        del rng
        start = 0.0
        while True:
            for _ in range(self.longs):
                yield Request(start, "long", self.long_tokens, self.output_tokens)
            for i in range(self.shorts):
                at = start + self.first_short_s + i * self.gap_s
                yield Request(round(at, 6), "short", self.short_tokens, self.output_tokens)
            start += self.every_s

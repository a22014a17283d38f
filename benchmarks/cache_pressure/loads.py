"""The loads: prompts that begin with shared prefixes, which together exceed all caches."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Final

from vllm_sched.bench.traffic.types import Request, TrafficSource

PREFIX_TOKENS: Final = (2_000, 200_000)
TAIL_TOKENS: Final = (100, 4_000)
OUTPUT_TOKENS: Final = (50, 300)
ZIPF: Final = 1.0
# Of sessions: the first prompt, the new tokens of each turn, and the number of turns.
FIRST_TOKENS: Final = (2_000, 60_000)
TURN_TOKENS: Final = (200, 4_000)
TURNS: Final = (4, 24)
MAX_PROMPT_TOKENS: Final = PREFIX_TOKENS[1] + TAIL_TOKENS[1]


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    return int(math.exp(rng.uniform(math.log(least), math.log(most))))


class SharedPrefixes(TrafficSource):
    """Prefixes of log-uniform lengths, drawn by Zipf's law, each with a tail of its own."""

    name, rate = "prefixes", 1.0

    def __init__(self, prefix_tokens: float) -> None:
        self._prefix_tokens = prefix_tokens  # of all prefixes together

    def requests(self, rng: random.Random) -> Iterator[Request]:
        lengths: list[int] = []
        while sum(lengths) < self._prefix_tokens:
            lengths.append(log_uniform(rng, *PREFIX_TOKENS))
        steps = list(accumulate(1 / (rank + 1) ** ZIPF for rank in range(len(lengths))))
        while True:
            at = min(bisect_right(steps, rng.random() * steps[-1]), len(lengths) - 1)
            prompt, output = lengths[at] + rng.randint(*TAIL_TOKENS), rng.randint(*OUTPUT_TOKENS)
            yield Request(0.0, "prefix", prompt, output, shared=((at, lengths[at]),))


@dataclass(slots=True)
class Session:
    name: int
    tokens: int
    turns: int  # still to come


class GrowingSessions(TrafficSource):
    """Sessions whose next prompt extends the last one; the idle one that comes next is drawn."""

    name, rate = "sessions", 1.0

    def __init__(self, prefix_tokens: float, pause: int) -> None:
        self._prefix_tokens = prefix_tokens  # of the open sessions together, about
        self._pause = pause  # requests between two turns, at least

    def requests(self, rng: random.Random) -> Iterator[Request]:
        names = count()
        idle: list[Session] = []
        while sum(session.tokens for session in idle) < self._prefix_tokens:
            session = self._open(next(names), rng)
            session.turns = rng.randint(1, session.turns)
            idle.append(session)
        busy: deque[Session] = deque()
        while True:
            session = idle.pop(rng.randrange(len(idle)))
            yield self._turn(session, rng)
            if session.turns <= 0 or session.tokens > MAX_PROMPT_TOKENS - TURN_TOKENS[1]:
                session = self._open(next(names), rng)
            busy.append(session)
            if len(busy) > min(self._pause, len(idle)):
                idle.append(busy.popleft())

    def _open(self, name: int, rng: random.Random) -> Session:
        return Session(name, log_uniform(rng, *FIRST_TOKENS), rng.randint(*TURNS))

    def _turn(self, session: Session, rng: random.Random) -> Request:
        session.turns -= 1
        session.tokens += rng.randint(*TURN_TOKENS)
        output = rng.randint(*OUTPUT_TOKENS)
        shared = ((session.name, session.tokens),)
        name = str(session.name)
        request = Request(0.0, "session", session.tokens, output, shared=shared, session=name)
        session.tokens += output  # the response is a part of the next prompt
        return request

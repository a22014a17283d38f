"""Sessions of coding agents, from published distributions.

TraceLab 2026 (4,265 sessions of Claude Code and Codex): turns, appended tokens, mean answer, share
of turns after a human. AIPerf's `inference-day-2026`: shared prefixes, first prompt, think times.
Ours: the longest session, compaction, sub-agents. Prompts have 190k tokens at p50 and 510k at p90;
96 % of turns repeat at least 90 % of their prompt.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, count
from typing import Final

from vllm_sched.bench.traffic.sessions.conversation import first_request
from vllm_sched.bench.traffic.tables import Quantiles
from vllm_sched.bench.traffic.types import Piece, Request, Session, TrafficSource, Turn

TURNS: Final = Quantiles(5, 16, 143, 1170, percents=(25, 50, 90, 99))
MAX_TURNS: Final = 220
NEW_TOKENS: Final = Quantiles(300, 780, 4500, 21_000, percents=(25, 50, 90, 99))
MAX_CONTEXT_TOKENS: Final = 1_000_000
SUMMARY_TOKENS: Final = 20_000
SYSTEM: Final[Piece] = ("agent-coding/system", 32_000)
REPOSITORY_TOKENS: Final = 10_000
REPOSITORY_STEPS: Final = tuple(accumulate((number + 1) ** -0.6 for number in range(100)))
HUMAN_SHARE: Final = 0.11
FORK_SHARE: Final = 0.02  # turns with sub-agents
MAX_FORKS: Final = 3
FORK_TURNS: Final = (2, 12)


class AgentCoding(TrafficSource):
    name = "agent-coding"
    rate = 0.05  # sessions per second; ours
    has_sessions = True

    def requests(self, rng: random.Random) -> Iterator[Request]:
        for number in count():
            yield first_request(agent_session(f"{self.name}/{number}", rng), 0.0, self.name)


def agent_session(name: str, rng: random.Random) -> Session:
    at = rng.random() * REPOSITORY_STEPS[-1]
    repository = f"agent-coding/repository-{bisect_right(REPOSITORY_STEPS, at)}"
    shared = (SYSTEM, (repository, REPOSITORY_TOKENS))
    root = SYSTEM[1] + REPOSITORY_TOKENS
    turns: list[Turn] = []
    new, context = _log_normal(rng, 5_000, 15_000, 50_000), root
    for number in range(min(TURNS.at(rng.random()), MAX_TURNS)):
        turn = _turn(rng, new)
        if context + new + turn.output_tokens > MAX_CONTEXT_TOKENS:
            context = root
            turn = replace(turn, new_tokens=SUMMARY_TOKENS, compacts=True)
        forks = _forks(f"{name}.{number}", shared, rng)
        turns.append(replace(turn, think_s=turn.think_s if number else 0.0, forks=forks))
        context += turn.new_tokens + turn.output_tokens
        new = NEW_TOKENS.at(rng.random())
    return Session(name, tuple(turns), shared)


def _turn(rng: random.Random, new: int) -> Turn:
    output = _log_normal(rng, 230, 520, 8_000)
    human = rng.random() < HUMAN_SHARE
    think = _log_normal(rng, 15_000, 30_000) if human else _log_normal(rng, 2_000, 5_000)
    return Turn(new, output, think / 1000)


def _forks(name: str, shared: tuple[Piece, ...], rng: random.Random) -> tuple[Session, ...]:
    if rng.random() >= FORK_SHARE:
        return ()
    return tuple(
        Session(
            f"{name}.{fork}",
            tuple(_turn(rng, NEW_TOKENS.at(rng.random())) for _ in range(rng.randint(*FORK_TURNS))),
            shared,
        )
        for fork in range(rng.randint(1, MAX_FORKS))
    )


def _log_normal(rng: random.Random, median: float, mean: float, maximum: float = math.inf) -> int:
    sigma = math.sqrt(2 * math.log(mean / median))
    return int(min(max(rng.lognormvariate(math.log(median), sigma), 1), maximum))

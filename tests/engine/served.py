"""The arrivals, served by the one engine under a set of policies."""

from __future__ import annotations

import random
import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.arrivals import ARRIVALS, seconds_of
from tests.engine.one_engine import add, exchange_scheduler, prompt_of


class Steps:
    """A clock that moves with the work of each step, and what the steps were."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tokens: list[list[int]] = []  # of each step's requests
        self.seconds: list[float] = []  # of each step that had tokens
        self.took: list[float] = []  # what those took of this machine's processor
        self._began = 0.0

    def begin(self, output: SchedulerOutput) -> None:
        """Note in how many tokens a step is divided."""
        self.tokens.append(sorted(output.num_scheduled_tokens.values()))
        self._began = time.process_time()

    def end(self, output: SchedulerOutput) -> None:  # noqa: ARG002
        """Let its time pass."""
        self.took.append(time.process_time() - self._began)
        self.seconds.append(seconds_of(len(self.tokens), self.tokens[-1]))
        self.now += self.seconds[-1]


def serve(engine: LLMEngine, policies: dict[str, Any] | None) -> dict[str, Any]:
    """Serve all, and tell each request's tokens and their times, and what every step was."""
    steps = Steps()
    scheduler = exchange_scheduler(engine, policies, steps)
    rng = random.Random(1)
    prompts = [prompt_of(size, rng) for _, size, _, _ in ARRIVALS]
    waiting = list(enumerate(ARRIVALS))
    outputs: dict[str, list[int]] = {}
    arrived: list[float] = []
    told: list[list[float]] = [[] for _ in ARRIVALS]  # when each token came
    for number in range(3000):
        while waiting and waiting[0][1][0] <= number:
            index, (_, _, length, lane) = waiting.pop(0)
            arrived.append(steps.now)
            add(engine, str(index), prompts[index], length, lane, steps.now)
        for done in engine.step():
            told[int(done.request_id)].append(steps.now)
            if done.finished:
                outputs[done.request_id] = list(done.outputs[0].token_ids)
        if not waiting and not engine.has_unfinished_requests():
            break
    return {
        "outputs": [outputs.get(str(index)) for index in range(len(ARRIVALS))],
        "arrived": arrived,
        "told": told,
        "steps": steps.tokens,
        "seconds": steps.seconds,
        "took": steps.took,
        "usage": scheduler.kv_cache_manager.usage,
        "counters": {p.name: dict(p.counters()) for p in getattr(scheduler, "_policies", ())},
    }

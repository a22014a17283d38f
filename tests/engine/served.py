"""The arrivals, served by the real engine under a set of policies."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.arrivals import ARRIVALS, seconds_of
from tests.engine.one_engine import add, exchange_scheduler, prompt_of


class StepClock:
    """A clock that advances with the work of each step, and records the steps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tokens: list[list[int]] = []  # of each step's requests
        self.seconds: list[float] = []  # of each step with tokens
        self.took: list[float] = []  # processor time of these steps
        self._began = 0.0

    def begin(self, output: SchedulerOutput) -> None:
        self.tokens.append(sorted(output.num_scheduled_tokens.values()))
        self._began = time.process_time()

    def end(self, output: SchedulerOutput) -> None:  # noqa: ARG002
        self.took.append(time.process_time() - self._began)
        self.seconds.append(seconds_of(len(self.tokens), self.tokens[-1]))
        self.now += self.seconds[-1]


def serve(
    engine: LLMEngine,
    policies: dict[str, Any] | None,
    *,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Serve all arrivals; return each request's tokens and their times, and every step.

    `before` is called between the start of the scheduler and the first request.
    """
    steps = StepClock()
    scheduler = exchange_scheduler(engine, policies, steps)
    before()
    rng = random.Random(1)
    prompts = [prompt_of(size, rng) for _, size, _, _ in ARRIVALS]
    waiting = list(enumerate(ARRIVALS))
    outputs: dict[str, list[int]] = {}
    arrived: list[float] = []
    token_times: list[list[float]] = [[] for _ in ARRIVALS]  # time of each token
    for number in range(3000):
        while waiting and waiting[0][1][0] <= number:
            index, (_, _, length, lane) = waiting.pop(0)
            arrived.append(steps.now)
            add(engine, str(index), prompts[index], length, lane, steps.now)
        for done in engine.step():
            token_times[int(done.request_id)].append(steps.now)
            if done.finished:
                outputs[done.request_id] = list(done.outputs[0].token_ids)
        if not waiting and not engine.has_unfinished_requests():
            break
    return {
        "outputs": [outputs.get(str(index)) for index in range(len(ARRIVALS))],
        "arrived": arrived,
        "token_times": token_times,
        "steps": steps.tokens,
        "seconds": steps.seconds,
        "took": steps.took,
        "usage": scheduler.kv_cache_manager.usage,
        "counters": {p.name: dict(p.counters()) for p in getattr(scheduler, "_policies", ())},
    }

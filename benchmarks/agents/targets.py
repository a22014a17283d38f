"""Latency targets of turns, chosen before the first run.

An agent's user waits for the whole task, a chain of turns: each must start soon and stream faster
than it is read. A turn is in time if its first token comes within 2 s plus 1.2x the time that its
new tokens take alone, the rest being cached, and its tokens take 100 ms each on average.
A load is served if 95 % of its turns are in time.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Final

from benchmarks.frontier.loads import prefill_s
from vllm_sched.bench.traffic.types import Request
from vllm_sched.cost.step_time import StepShape
from vllm_sched.sim.types import WorkerModel

TTFT_S: Final = 2.0
TTFT_ALONE: Final = 1.2
TPOT_S: Final = 0.1
SERVED: Final = 0.95


class Alone:
    """The times of turns on an idle worker that has the session's last turn cached."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model
        self._prefill_s = lru_cache(maxsize=65_536)(partial(prefill_s, model))

    def ttft_s(self, request: Request) -> float:
        cached = request.context_tokens
        return self._prefill_s(request.prompt_tokens - cached, cached)

    def turn_s(self, request: Request) -> float:
        context = request.prompt_tokens + request.output_tokens // 2
        step_s = self._model.time.seconds(StepShape.from_chunks([], 1, context))
        return self.ttft_s(request) + (request.output_tokens - 1) * step_s

    def ttft_limit_s(self, request: Request) -> float:
        return TTFT_S + TTFT_ALONE * self.ttft_s(request)

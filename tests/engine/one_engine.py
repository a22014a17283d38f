"""One real engine in this process, under several schedulers in turn.

An engine takes most of a minute to start, a scheduler nothing. So the scheduler of an idle engine
is exchanged. Its clock moves by hand.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_sched import SyncPolicyScheduler
from vllm_sched.workers.tiny_model import tiny_model


def make_engine(max_num_seqs: int = 6) -> LLMEngine:
    """Start an engine that is small enough for waits and preemptions."""
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(tiny_model()),
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=2048,
            max_num_batched_tokens=256,
            max_num_seqs=max_num_seqs,
            num_gpu_blocks_override=100,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
    )


class Watch(Protocol):
    """Observes each step, and is the clock."""

    now: float

    def begin(self, output: SchedulerOutput) -> None:
        """Record that a step is scheduled."""

    def end(self, output: SchedulerOutput) -> None:
        """Advance the clock at the step's result; not called for a step without tokens."""


class ClockedScheduler(SyncPolicyScheduler):
    """A policy scheduler with such a clock."""

    watch: Watch  # set before the first request

    def clock(self) -> float:
        return self.watch.now

    wall_clock = clock


def exchange_scheduler(engine: LLMEngine, policies: dict[str, Any] | None, watch: Watch) -> Any:
    """Put a new scheduler into an idle engine; without policies it is vLLM's."""
    core = engine.engine_core.engine_core
    old = core.scheduler
    config = engine.vllm_config
    config.additional_config = {} if policies is None else {"vllm_sched": policies}
    core.scheduler = (Scheduler if policies is None else ClockedScheduler)(
        vllm_config=config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        log_stats=core.log_stats,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
    )
    core.scheduler.watch = watch
    schedule, update = core.scheduler.schedule, core.scheduler.update_from_output

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        watch.begin(output)
        return output

    def timed(output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens:
            watch.end(output)
        return update(output, *args, **kwargs)

    core.scheduler.schedule, core.scheduler.update_from_output = noted, timed
    return core.scheduler


def add(
    engine: LLMEngine, name: str, prompt: list[int], output: int, lane: str | None, now: float
) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=output, ignore_eos=True,
        extra_args=None if lane is None else {"lane": lane},
    )  # fmt: skip
    engine.add_request(name, {"prompt_token_ids": prompt}, params, arrival_time=now)


def prompt_of(tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(10, 400) for _ in range(tokens)]

"""One real engine in this process, run under each of many schedulers: `python -m ... SETS`.

Starting an engine takes most of a minute, a scheduler nothing: so the model and its runner are kept
and the scheduler is exchanged while nobody is served. Prints, as JSON, for each set of policies the
tokens of every request, and in how many tokens each step was divided.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.arrivals import ARRIVALS
from vllm_sched import SyncPolicyScheduler
from vllm_sched.workers.tiny_model import tiny_model


def make_engine() -> LLMEngine:
    """Start the engine, small enough that requests wait and preempt each other."""
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(tiny_model()),
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=2048,
            max_num_batched_tokens=256,
            max_num_seqs=6,
            num_gpu_blocks_override=100,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
    )


def exchange_scheduler(engine: LLMEngine, policies: dict[str, Any] | None) -> Any:
    """Put a new scheduler into an idle engine; without policies it is upstream's."""
    core = engine.engine_core.engine_core
    old = core.scheduler
    config = engine.vllm_config
    config.additional_config = {} if policies is None else {"vllm_sched": policies}
    core.scheduler = (Scheduler if policies is None else SyncPolicyScheduler)(
        vllm_config=config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        log_stats=core.log_stats,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
    )
    return core.scheduler


def run(engine: LLMEngine, policies: dict[str, Any] | None) -> dict[str, Any]:
    """Serve everybody and tell what came of it."""
    scheduler = exchange_scheduler(engine, policies)
    steps: list[list[int]] = []
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append(sorted(output.num_scheduled_tokens.values()))
        return output

    scheduler.schedule = noted
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 400) for _ in range(size)] for _, size, _, _ in ARRIVALS]
    waiting = list(enumerate(ARRIVALS))
    outputs: dict[str, list[int]] = {}
    for number in range(3000):
        while waiting and waiting[0][1][0] <= number:
            index, (_, _, length, lane) = waiting.pop(0)
            params = SamplingParams(
                temperature=0.0, max_tokens=length, ignore_eos=True,
                extra_args=None if lane is None else {"lane": lane},
            )  # fmt: skip
            engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, params)
        for done in engine.step():
            if done.finished:
                outputs[done.request_id] = list(done.outputs[0].token_ids)
        if not waiting and not engine.has_unfinished_requests():
            break
    return {
        "outputs": [outputs.get(str(index)) for index in range(len(ARRIVALS))],
        "steps": steps,
        "usage": scheduler.kv_cache_manager.usage,
        "counters": {p.name: dict(p.counters()) for p in getattr(scheduler, "_policies", ())},
    }


def main() -> None:
    """Run the sets given as JSON."""
    engine = make_engine()
    done = [run(engine, policies) for policies in json.loads(sys.argv[1])]
    sys.stdout.write(f"{json.dumps(done)}\n")


if __name__ == "__main__":
    main()

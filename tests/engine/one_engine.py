"""One real engine in this process, run under each of many schedulers: `python -m ... SETS TAKES`.

Starting an engine takes most of a minute, a scheduler nothing: so the model and its runner are kept
and the scheduler is exchanged while nobody is served. Prints, as JSON, for each of a few takes and
each set of policies the tokens of every request and when it got them, and of each step in how many
tokens it was divided and how long it took.

Time is what steps take of the processor, not of the clock, and of a processor that is always as
fast as it was at the start: beside each step a piece of work is timed that is always the same.
Whoever else has the machine to do, a scheduler sees what it would see alone. (Where others share a
processor's caches and its power, runs of some seconds take up to 1.8 times as long as their like;
over 45 runs the time of that piece went with them, correlation 0.97.)
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import deque
from statistics import median
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

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.arrivals import ARRIVALS
from vllm_sched import SyncPolicyScheduler
from vllm_sched.workers.tiny_model import tiny_model

# What takes beside the quickest where nobody disturbs them, and how many times as many to try.
PEACE, MOST = 1.1, 4


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


class Pace:
    """How fast the processor is by now, beside the start: the last turns of some work tell."""

    TURNS = 9

    def __init__(self) -> None:
        self._left, self._right = torch.ones(64, 512), torch.ones(512, 512)
        self._last: deque[float] = deque(maxlen=self.TURNS)
        while len(self._last) < self.TURNS:
            self.tick()
        self._at_start = median(self._last)

    def tick(self) -> None:
        """Do the piece once more."""
        began = time.process_time()
        for _ in range(2):
            torch.mm(self._left, self._right)
        self._last.append(time.process_time() - began)

    def at_start(self, seconds: float) -> float:
        """Tell how long this would have taken then."""
        return seconds * self._at_start / median(self._last)


class Clock:
    """Moves while a step is computed."""

    def __init__(self, pace: Pace) -> None:
        self.now = 0.0
        self._pace = pace
        self.seconds: list[float] = []  # that each step took
        self._began = 0.0

    def begin(self) -> None:
        """Note that a step is scheduled."""
        self._pace.tick()
        self._began = time.process_time()

    def end(self) -> None:
        """Note that its result is here."""
        self.seconds.append(self._pace.at_start(time.process_time() - self._began))
        self.now += self.seconds[-1]


class Clocked(SyncPolicyScheduler):
    """Ours, by such a clock."""

    run: Clock  # which one, is said before anybody comes

    def clock(self) -> float:
        """Tell it."""
        return self.run.now

    wall_clock = clock


def exchange_scheduler(engine: LLMEngine, policies: dict[str, Any] | None) -> Any:
    """Put a new scheduler into an idle engine; without policies it is upstream's."""
    core = engine.engine_core.engine_core
    old = core.scheduler
    config = engine.vllm_config
    config.additional_config = {} if policies is None else {"vllm_sched": policies}
    core.scheduler = (Scheduler if policies is None else Clocked)(
        vllm_config=config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        log_stats=core.log_stats,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
    )
    return core.scheduler


def run(engine: LLMEngine, pace: Pace, policies: dict[str, Any] | None) -> dict[str, Any]:
    """Serve everybody and tell what came of it."""
    scheduler = exchange_scheduler(engine, policies)
    clock = scheduler.run = Clock(pace)
    steps: list[list[int]] = []
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append(sorted(output.num_scheduled_tokens.values()))
        clock.begin()
        return output

    def timed(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens:
            clock.end()
        return update(output, *args, **kwargs)

    scheduler.schedule, scheduler.update_from_output = noted, timed
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 400) for _ in range(size)] for _, size, _, _ in ARRIVALS]
    waiting = list(enumerate(ARRIVALS))
    outputs: dict[str, list[int]] = {}
    arrived: list[float] = []
    told: list[list[float]] = [[] for _ in ARRIVALS]  # when each token came
    for number in range(3000):
        while waiting and waiting[0][1][0] <= number:
            index, (_, _, length, lane) = waiting.pop(0)
            params = SamplingParams(
                temperature=0.0, max_tokens=length, ignore_eos=True,
                extra_args=None if lane is None else {"lane": lane},
            )  # fmt: skip
            arrived.append(clock.now)
            prompt = {"prompt_token_ids": prompts[index]}
            engine.add_request(str(index), prompt, params, arrival_time=clock.now)
        for done in engine.step():
            told[int(done.request_id)].append(clock.now)
            if done.finished:
                outputs[done.request_id] = list(done.outputs[0].token_ids)
        if not waiting and not engine.has_unfinished_requests():
            break
    return {
        "outputs": [outputs.get(str(index)) for index in range(len(ARRIVALS))],
        "arrived": arrived,
        "told": told,
        "steps": steps,
        "seconds": clock.seconds,
        "usage": scheduler.kv_cache_manager.usage,
        "counters": {p.name: dict(p.counters()) for p in getattr(scheduler, "_policies", ())},
    }


Take = list[dict[str, Any]]  # a run under each set


def seconds_of(take: Take) -> float:
    """Add up what its steps took."""
    return sum(sum(each["seconds"]) for each in take)


def is_enough(done: list[Take], takes: int) -> bool:
    """Whether there are so many takes, and most of so many were left in peace.

    Where a neighbour had half of them or more, the middle of what a step took is his doing.
    """
    took = sorted(map(seconds_of, done))[:takes]
    return len(took) == takes and took[takes // 2] < PEACE * took[0]


def main() -> None:
    """Run the sets given as JSON, in turns, so often, and more often while there is no peace."""
    engine, sets, takes = make_engine(), json.loads(sys.argv[1]), int(sys.argv[2])
    pace = Pace()
    done: list[Take] = []
    for number in range(1 + MOST * takes):
        take = [run(engine, pace, policies) for policies in sets]
        if number:  # a step of as many tokens as none had before takes up to three times as long
            done.append(take)
        if is_enough(done, takes):
            break
    done.sort(key=seconds_of)
    sys.stdout.write(f"{json.dumps(done[:takes])}\n")


if __name__ == "__main__":
    main()

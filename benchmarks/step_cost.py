"""Measure the cost of `schedule()` with our policies and of upstream's: `make bench`.

Scheduler objects with 256 running requests (255 decodes and a long prefill) and many waiting ones,
half of them long and held. Scenes:

- taken: all slots are taken.
- free, no KV: slots are free but the KV cache is full, so the scan admits no request.
- taken, little KV: the next step may preempt, and lanes sort the running requests.
- LoRA slots full, grammars compiling, look-ups pending: slots and KV cache are free, but vLLM skips
  each waiting request. There are 256 decodes and no prefill, so both sides scan the queue.

Both sides take the same steps in turns. The figures are medians of processor time, which other
programs hardly change. The last column includes `update_from_output()`, which fits cost models.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import product
from operator import truediv
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.schedulers import BLOCK, answer, make_request, make_scheduler
from vllm_sched import PolicyScheduler, SyncPolicyScheduler

RUNNING = 256
LONG_TOKENS, SHORT_TOKENS = 6_000, 200  # long is above 5,242, 4 % of the context
KINDS = {
    "async": (AsyncScheduler, PolicyScheduler),
    "sync": (Scheduler, SyncPolicyScheduler),
}
Policies = Mapping[str, Mapping[str, object]]
# The last three are the largest sets without contradictions. `prefill_first` is left out, because
# its steps are not upstream's.
SETS: dict[str, Policies] = {
    "long_prompt": {"long_prompt": {}},
    "lanes": {"lanes": {}},
    "rotation": {"rotation": {}},
    "chunk_budget": {"chunk_budget": {}},
    "deferred_prefill": {"deferred_prefill": {}},
    "every": {
        "lanes": {}, "long_prompt": {}, "deferred_prefill": {"departures": 4}, "rotation": {},
        "chunk_budget": {},
    },
    # Fits step times and looks for cached prefixes, and holds no request here.
    "every, auto": {
        "lanes": {}, "long_prompt": {}, "deferred_prefill": {"departures": "auto"}, "rotation": {},
        "chunk_budget": {},
    },
    "every, static": {
        "static_batching": {}, "lanes": {}, "long_prompt": {}, "rotation": {}, "chunk_budget": {},
    },
}  # fmt: skip
EVERY = ("every", "every, auto", "every, static")
TAKEN, FREE, LITTLE = ("taken", "free, no KV", "taken, little KV")
LORAS, GRAMMARS, LOOKUPS = SKIPPED = (
    "LoRA slots full", "grammars compiling", "look-ups pending"
)  # fmt: skip
SCENES = (TAKEN, FREE, LITTLE, *SKIPPED)
# Upstream skips each waiting request in each step: with more, a run takes minutes.
MAX_SKIPPED = 1_000
MAX_LORAS, WAITING_ADAPTERS = 2, 8
# Fewer blocks than the running requests may need, enough for the next step.
LITTLE_KV_BLOCKS = 400
WARM_UP_STEPS = 5


class StepSeconds(NamedTuple):
    schedule: float
    whole: float  # with `update_from_output()`


def make_loaded(kind: type, policies: Policies | None, waiting: int, scene: str = TAKEN) -> Any:
    """Return a scheduler with 256 running and some waiting requests."""
    decode_tokens = 8
    decodes = (RUNNING - 1) * -(-(decode_tokens + 2000) // BLOCK)
    scheduler = make_scheduler(
        policies,
        scheduler_cls=kind,
        budget=1024,
        max_model_len=131_072,
        max_num_seqs=RUNNING,
        num_blocks=decodes + 131_072 // BLOCK + 1,
        scheduler_reserve_full_isl=True,
    )
    # Two priority classes, so that lanes sort the running requests.
    better = -1 if scene == LITTLE else 0
    for number in range(RUNNING - 1):
        priority = better if number % 2 else 0
        scheduler.add_request(make_request(decode_tokens, output=2000, priority=priority))
    scheduler.add_request(make_request(120_000, output=10, priority=better))
    while len(scheduler.running) < RUNNING:
        take_step(scheduler)
    take_step(scheduler)
    if scene == FREE:
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 2 * RUNNING
        pool = scheduler.kv_cache_manager.block_pool
        needed = decodes + 131_072 // BLOCK  # enough for running requests, none for others
        pool.get_new_blocks(max(pool.get_num_free_blocks() - needed, 0))
        scheduler.kv_cache_manager.watermark_blocks = pool.get_num_free_blocks()
    for number in range(waiting):
        tokens = LONG_TOKENS if number % 2 else SHORT_TOKENS
        priority = number % 3 - 1
        scheduler.add_request(make_request(tokens, output=10, priority=priority, hashed=False))
    assert len(scheduler.running) == RUNNING
    return scheduler


def make_skipping(kind: type, policies: Policies | None, waiting: int, scene: str) -> Any:
    """Return a scheduler with 256 decodes, and waiting requests that vLLM skips."""
    scheduler = make_scheduler(
        policies,
        scheduler_cls=kind,
        budget=1024,
        max_model_len=131_072,
        max_num_seqs=2 * RUNNING,
        num_blocks=RUNNING * 2048 // BLOCK + 10_000,
        max_loras=MAX_LORAS if scene == LORAS else 0,
        connector="SimulatedConnector" if scene == LOOKUPS else None,
    )
    for number in range(RUNNING):
        adapter = 1 + number % MAX_LORAS if scene == LORAS else 0
        scheduler.add_request(make_request(8, output=2000, adapter=adapter))
    while len(scheduler.running) < RUNNING:
        take_step(scheduler)
    if scene == LOOKUPS:
        scheduler.connector.get_num_new_matched_tokens = lambda *_: (None, False)
    for number in range(waiting):
        tokens = LONG_TOKENS if number % 2 else SHORT_TOKENS
        adapter = MAX_LORAS + 1 + number % WAITING_ADAPTERS if scene == LORAS else 0
        grammar: Future[Any] | None = Future() if scene == GRAMMARS else None
        scheduler.add_request(
            make_request(
                tokens, output=10, priority=number % 3 - 1, hashed=False, adapter=adapter,
                grammar=grammar,
            )
        )  # fmt: skip
    assert len(scheduler.running) == RUNNING
    return scheduler


def limit_free_blocks(scheduler: Any, reserve: list[Any]) -> None:
    """Move blocks between the pool and the reserve until LITTLE_KV_BLOCKS are free."""
    pool = scheduler.kv_cache_manager.block_pool
    excess = pool.get_num_free_blocks() - LITTLE_KV_BLOCKS
    if excess > 0:
        reserve += pool.get_new_blocks(excess)
    elif excess < 0:
        pool.free_blocks(reserve[excess:])
        del reserve[excess:]


def take_step(scheduler: Any) -> StepSeconds:
    start = time.process_time()
    output = scheduler.schedule()
    took = time.process_time() - start
    answered = answer(scheduler, output)
    start = time.process_time()
    scheduler.update_from_output(output, answered)
    return StepSeconds(took, took + time.process_time() - start)


def measure(
    kinds: tuple[type, type], policies: Policies, waiting: int, steps: int, scene: str
) -> list[StepSeconds]:
    """Return the median times of both sides."""
    make = make_skipping if scene in SKIPPED else make_loaded
    theirs, ours = kinds
    schedulers = make(theirs, None, waiting, scene), make(ours, policies, waiting, scene)
    reserves: list[list[Any]] = [[], []]
    times: list[list[StepSeconds]] = [[], []]
    for number in range(steps):
        for side in (0, 1) if number % 2 else (1, 0):
            if scene == LITTLE:
                limit_free_blocks(schedulers[side], reserves[side])
            times[side].append(take_step(schedulers[side]))
    assert all(len(scheduler.running) == RUNNING for scheduler in schedulers)
    assert all(len(scheduler.waiting) == waiting for scheduler in schedulers)
    return [medians(side[WARM_UP_STEPS:]) for side in times]


def medians(times: Sequence[StepSeconds]) -> StepSeconds:
    return StepSeconds(*map(statistics.median, zip(*times, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 1_000, 10_000])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["long_prompt", *EVERY])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--slots", nargs="+", choices=SCENES, default=list(SCENES))
    arguments = parser.parse_args()
    console = Console()
    table = Table(
        *("policies", "scheduler", "slots", "waiting", "upstream us", "ours us", "ratio"),
        "ratio of whole steps",
    )
    gc.disable()
    cases = product(arguments.sets, arguments.kinds, arguments.slots, arguments.waiting)
    for label, name, scene, waiting in cases:
        if scene in SKIPPED and waiting > MAX_SKIPPED:
            continue
        rounds = []
        for _ in range(arguments.rounds):
            rounds.append(measure(KINDS[name], SETS[label], waiting, arguments.steps, scene))
            gc.collect()
        theirs, ours = map(medians, zip(*rounds, strict=True))
        ratios = [StepSeconds(*map(truediv, mine, other)) for other, mine in rounds]
        table.add_row(
            label, name, scene, f"{waiting:,}",
            *(f"{side.schedule * 1e6:.0f}" for side in (theirs, ours)),
            *(f"{ratio:.2f}" for ratio in medians(ratios)),
        )  # fmt: skip
        console.print(".", end="")
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()

"""What a call of `schedule()` costs with our policies, beside upstream's: `make bench`.

Real Scheduler objects with 256 running (255 decodes and a long prefill) and many waiting, half of
them long and held. Both sides take the same steps in turns; medians of the times of the call alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.schedulers import BLOCK, answer, make_request, make_scheduler
from vllm_sched import LongPromptScheduler, SyncLongPromptScheduler

RUNNING = 256
LONG_TOKENS, SHORT_TOKENS = 6_000, 200  # long is above 5,242, 4 % of the context
PAIRS = {
    "async": (AsyncScheduler, LongPromptScheduler),
    "sync": (Scheduler, SyncLongPromptScheduler),
}


def loaded(kind: type, waiting: int, *, slots_free: bool) -> Any:
    """Make a scheduler in the state to measure.

    Its slots are all taken, or there are more but no room in the KV cache: then the scan looks at
    who waits, and finds nobody it can admit.
    """
    decode_tokens = 8
    decodes = (RUNNING - 1) * -(-(decode_tokens + 2000) // BLOCK)
    scheduler = make_scheduler(
        scheduler_cls=kind,
        budget=1024,
        max_model_len=131_072,
        max_num_seqs=RUNNING,
        num_blocks=decodes + 131_072 // BLOCK + 1,
        scheduler_reserve_full_isl=True,
    )
    for _ in range(RUNNING - 1):
        scheduler.add_request(make_request(decode_tokens, output=2000))
    for _ in range(4):
        take_step(scheduler)
    scheduler.add_request(make_request(120_000, output=10))
    take_step(scheduler)
    if slots_free:
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 2 * RUNNING
        pool = scheduler.kv_cache_manager.block_pool
        needed = decodes + 131_072 // BLOCK  # those who run go on; a newcomer finds nothing
        pool.get_new_blocks(max(pool.get_num_free_blocks() - needed, 0))
        scheduler.kv_cache_manager.watermark_blocks = pool.get_num_free_blocks()
    for number in range(waiting):
        tokens = LONG_TOKENS if number % 2 else SHORT_TOKENS
        scheduler.add_request(make_request(tokens, output=10))
    assert len(scheduler.running) == RUNNING
    return scheduler


def take_step(scheduler: Any) -> float:
    """Step once and return the seconds that `schedule()` took."""
    start = time.perf_counter()
    output = scheduler.schedule()
    took = time.perf_counter() - start
    scheduler.update_from_output(output, answer(scheduler, output))
    return took


def measure(kinds: tuple[type, type], waiting: int, steps: int, *, slots_free: bool) -> list[float]:
    """Return the median seconds of both sides, which step in turns."""
    schedulers = [loaded(kind, waiting, slots_free=slots_free) for kind in kinds]
    times: list[list[float]] = [[], []]
    for number in range(steps):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(take_step(schedulers[side]))
    assert all(len(scheduler.running) == RUNNING for scheduler in schedulers)
    assert all(len(scheduler.waiting) == waiting for scheduler in schedulers)
    return [statistics.median(side[5:]) for side in times]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 1000, 10_000])
    arguments = parser.parse_args()

    console = Console()
    table = Table("scheduler", "slots", "waiting", "upstream us", "ours us", "ratio")
    gc.disable()
    for name, kinds in PAIRS.items():
        for slots_free in (False, True):
            for waiting in arguments.waiting:
                rounds = []
                for _ in range(arguments.rounds):
                    rounds.append(measure(kinds, waiting, arguments.steps, slots_free=slots_free))
                    gc.collect()
                theirs, ours = (statistics.median(side) for side in zip(*rounds, strict=True))
                ratio = statistics.median(mine / other for other, mine in rounds)
                slots = "free, no KV" if slots_free else "taken"
                table.add_row(
                    name, slots, f"{waiting:,}", f"{theirs * 1e6:.0f}", f"{ours * 1e6:.0f}",
                    f"{ratio:.2f}",
                )  # fmt: skip
                console.print(".", end="")
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()

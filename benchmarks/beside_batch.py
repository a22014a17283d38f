"""Compare chats beside a full batch under `lanes`, alone, and under vLLM's priority scheduling.

    python -m benchmarks.beside_batch --machines "H100 8B" --budgets 2048 --seeds 1 2 3

Real schedulers in virtual time, asynchronous, with costs measured on GPUs: the output is the same
on any machine. Batch requests have priority 1 and are more than the engine can serve.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

from benchmarks.agreement import by_job
from benchmarks.frontier.cells import BUDGETS, MACHINES, Cell
from benchmarks.frontier.loads import CHAT, OUTPUT_TOKENS, chats
from tests.sim.making import drain
from vllm_sched.bench.results.stats import percentile
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.types import Job, WorkerModel

SECONDS: Final = 20.0
BATCH_REQUESTS: Final = 6_000
BATCH_TOKENS: Final = (300, 1_200)
TARGETS: Final = (1.2, 1.3, 1.2, 0.95)
HEADINGS: Final = ("TTFT p50", "TTFT p99", "ITL p50", "batch tokens/s")


@dataclass(frozen=True, slots=True)
class Figures:
    """The chats' times in seconds, and the batch's tokens per second."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    batch_rate: float


class PriorityEngine(ExactEngine):
    """vLLM's scheduler with `--scheduling-policy priority`."""

    def __init__(self, model: WorkerModel) -> None:
        super().__init__(model)
        scheduler = self.simulated.scheduler
        scheduler.policy = SchedulingPolicy.PRIORITY
        scheduler.waiting = create_request_queue(scheduler.policy)
        scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)


def batch(rng: random.Random) -> Iterator[tuple[float, Job]]:
    for number in range(BATCH_REQUESTS):
        prompt, output = rng.randint(*BATCH_TOKENS), rng.randint(*OUTPUT_TOKENS)
        job = Job(f"batch{number}", prompt, output, text=rng.getrandbits(60), priority=1)
        yield 0.0, job


def play(engine: ExactEngine, seed: int, *, with_batch: bool) -> Figures:
    rng = random.Random(seed)
    jobs = list(chats(engine.model, rng, SECONDS))
    if with_batch:
        jobs = [*batch(rng), *jobs]
    events = []
    for at, job in jobs:
        events += drain(engine, at)
        engine.submit(job, at)
    times = by_job([*events, *drain(engine, SECONDS)])
    of_chats = [(at, times[job.id]) for at, job in jobs if job.klass == CHAT and job.id in times]
    ttfts = [tokens[0] - at for at, tokens in of_chats]
    gaps = [b - a for _, tokens in of_chats for a, b in pairwise(tokens)]
    done = sum(
        len(times[job.id]) + job.prompt_tokens
        for _, job in jobs
        if job.klass != CHAT and job.id in times
    )
    ttft_p50, ttft_p99, itl = (
        percentile(values, q) or 0.0 for values, q in ((ttfts, 50), (ttfts, 99), (gaps, 50))
    )
    return Figures(ttft_p50, ttft_p99, itl, done / SECONDS)


def ratios(model: WorkerModel, seed: int) -> tuple[float, ...]:
    """Return TTFT of chats to that alone; ITL and batch to those of priority scheduling."""
    lanes = replace(model, policies={"lanes": {}})
    alone = play(ExactEngine(lanes), seed, with_batch=False)
    both = play(ExactEngine(lanes), seed, with_batch=True)
    priority = play(PriorityEngine(model), seed, with_batch=True)
    return (
        both.ttft_p50 / alone.ttft_p50,
        both.ttft_p99 / alone.ttft_p99,
        both.itl_p50 / priority.itl_p50,
        both.batch_rate / priority.batch_rate,
        priority.ttft_p50 / alone.ttft_p50,
        priority.ttft_p99 / alone.ttft_p99,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the ratios of each machine and budget, medians over the seeds."""
    parser = argparse.ArgumentParser(prog="beside_batch", description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args(argv)
    table = Table("machine, budget", *HEADINGS, "priority scheduling: TTFT p50, p99")
    for machine in args.machines:
        for budget in args.budgets:
            model = Cell(machine, budget, "").model
            by_seed = [ratios(model, seed) for seed in args.seeds]
            middle = [median(column) for column in zip(*by_seed, strict=True)]
            table.add_row(
                f"{machine}, {budget}",
                *(f"{ratio:.2f}x" for ratio in middle[:4]),
                f"{middle[4]:.2f}x, {middle[5]:.2f}x",
            )
    table.add_row("target", *(f"{target}x" for target in TARGETS), end_section=True)
    Console().print(table)


if __name__ == "__main__":
    main()

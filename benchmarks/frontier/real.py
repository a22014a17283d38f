"""Compare policies and baselines on real workers of a tiny model.

    python -m benchmarks.frontier.real --budgets 256 512 2048 --rounds 3

The workers of a budget run at once and take turns on the same arrivals. Nothing else should run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.console import Console

from benchmarks.frontier.baseline import HoldAndCapScheduler
from benchmarks.frontier.cells import DEFAULT, UPSTREAM
from benchmarks.frontier.play import Figures
from benchmarks.frontier.report import table
from vllm_sched.bench.compare.compare import (
    ComparisonPlan,
    ProgressReporter,
    contender,
    measure,
    running,
)
from vllm_sched.bench.compare.report import itls, total_rate, ttfts
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import (
    BACKGROUND,
    LONG,
    SHORT,
    Workload,
    long_blocks_short,
)
from vllm_sched.bench.results.stats import percentile
from vllm_sched.errors import VllmSchedError
from vllm_sched.workers import launch
from vllm_sched.workers.launch import Side
from vllm_sched.workers.tiny_model import tiny_model

CLASS: Final = f"{HoldAndCapScheduler.__module__}.{HoldAndCapScheduler.__name__}"
SIDES: Final[Mapping[str, Side]] = {
    UPSTREAM: Side.parse(launch.DEFAULT),
    "35 lines": Side.parse(launch.DEFAULT, extra=(f"--scheduler-cls={CLASS}",)),
    DEFAULT: Side.parse(DEFAULT),
}
BUDGETS: Final = (256, 512, 2048)


def loads(seed: int) -> dict[str, Workload]:
    """Return the loads; their lengths vary with the seed."""
    tokens = 9_000 + 500 * (seed % 7)
    return {
        "one long prompt": long_blocks_short(longs=1, long_tokens=tokens, seed=seed),
        "two long prompts": long_blocks_short(longs=2, long_tokens=tokens, seed=seed),
        "eight long prompts": long_blocks_short(longs=8, long_tokens=tokens // 3, seed=seed),
    }


async def compare(
    model: str, budget: int, rounds: int, seed: int, reporter: ProgressReporter
) -> dict[str, dict[str, list[Figures]]]:
    """Return the figures of each side by round, for each load."""
    flags = ("--max-num-batched-tokens", str(budget), "--no-enable-prefix-caching")
    plans = {
        name: ComparisonPlan(model, replace(load, worker_flags=flags), rounds, lone_samples=0)
        for name, load in loads(seed).items()
    }
    any_plan = next(iter(plans.values()))
    contenders = [
        contender(name, side, any_plan, sharing=len(SIDES)) for name, side in SIDES.items()
    ]
    load_figures: dict[str, dict[str, list[Figures]]] = {}
    async with running([side.worker for side in contenders], reporter):
        for name, plan in plans.items():
            sides = [replace(side, rounds=[]) for side in contenders]
            await measure(sides, plan, reporter)
            load_figures[name] = {side.role: [*map(figures, side.rounds)] for side in sides}
            if failed := [side.role for side in sides if side.failed]:
                raise VllmSchedError(f"requests to {', '.join(failed)} failed")
    return load_figures


def figures(played: Round) -> Figures:
    longs = ttfts([played], LONG)
    return Figures(
        percentile(ttfts([played], SHORT), 99),
        fmean(longs) if longs else None,
        percentile(itls([played], BACKGROUND), 99),
        total_rate(played) or 0.0,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each budget and load; return 1 if a worker or a request failed."""
    parser = argparse.ArgumentParser(prog="frontier.real", description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # workers import the baseline
    model = str(tiny_model())
    for budget in args.budgets:
        try:
            with ProgressReporter(console) as reporter:
                loads_of_budget = asyncio.run(
                    compare(model, budget, args.rounds, args.seed, reporter)
                )
        except VllmSchedError as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
        for load, sides in loads_of_budget.items():
            console.print(table(f"tiny model, budget {budget}, {load}", sides))
    return 0


if __name__ == "__main__":
    sys.exit(main())

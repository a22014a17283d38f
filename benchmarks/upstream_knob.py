"""Compare our policy with vLLM's option for long prompts, over the option's useful range.

    python benchmarks/upstream_knob.py --longs 2 --thresholds 64 128 --rounds 1

vLLM limits a long prompt's chunk with `--long-prefill-token-threshold`, alone or `-adaptive`. Small
chunks keep short prompts fast and make long ones slow; the best value depends on the number of long
prompts. Our worker stays up and takes turns with a worker of each setting, on the same arrivals, so
that a slow minute of the machine affects both. A start takes most of a minute, the whole range half
an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_sched.bench.compare.compare import (
    ComparisonPlan,
    Contender,
    ProgressReporter,
    contender,
    measure,
    running,
)
from vllm_sched.bench.compare.report import RATE, SECONDS, show, total_rate, ttfts
from vllm_sched.bench.compare.workloads import LONG, SHORT, long_blocks_short
from vllm_sched.bench.results.stats import percentile
from vllm_sched.errors import VllmSchedError
from vllm_sched.workers.launch import DEFAULT, Side
from vllm_sched.workers.tiny_model import tiny_model

KNOB = "--long-prefill-token-threshold"
MEASURES = "short TTFT p99, mean long TTFT and tokens/s"


@dataclass(frozen=True)
class Result:
    """One scheduler under one load; times in seconds."""

    short_p50: float
    short_p99: float
    long_mean: float
    long_max: float
    tokens_per_s: float
    failed: int

    def at_least_as_good_as(self, other: Result) -> bool:
        """Return whether no measure is worse than the other's."""
        return (
            self.short_p99 <= other.short_p99
            and self.long_mean <= other.long_mean
            and self.tokens_per_s >= other.tokens_per_s
        )


@dataclass(frozen=True)
class Duel:
    """A setting of vLLM's option, and our policy in the same rounds."""

    setting: str
    theirs: Result
    ours: Result


def settings(thresholds: Sequence[int]) -> dict[str, Side]:
    """Return vLLM's scheduler with each setting of the option, by a short name."""
    sides = {"off": Side.parse(DEFAULT)}
    for suffix, adaptive in (("", ()), (" adaptive", (f"{KNOB}-adaptive",))):
        for threshold in thresholds:
            knob = (f"{KNOB}={threshold}", *adaptive)
            sides[f"{threshold}{suffix}"] = Side.parse(DEFAULT, extra=knob)
    return sides


async def survey(
    ours: Side,
    others: Mapping[str, Side],
    plans: Sequence[ComparisonPlan],
    reporter: ProgressReporter,
) -> list[list[Duel]]:
    """Compare our side with every other side under every plan; return a list per plan."""
    duels: list[list[Duel]] = [[] for _ in plans]
    ours_up = contender(ours.name, ours, plans[0])
    async with running([ours_up.worker], reporter):
        for name, side in others.items():
            other = contender(f"threshold {name}", side, plans[0])
            async with running([other.worker], reporter):
                for plan, plan_duels in zip(plans, duels, strict=True):
                    a, b = replace(ours_up, rounds=[]), replace(other, rounds=[])
                    await measure((a, b), plan, reporter)
                    plan_duels.append(Duel(name, summarise(b), summarise(a)))
    return duels


def summarise(contender: Contender) -> Result:
    """Return the figures of a contender's rounds."""
    shorts, longs = ttfts(contender.rounds, SHORT), ttfts(contender.rounds, LONG)
    missing = float("inf")  # worse than any time
    return Result(
        percentile(shorts, 50) or missing,
        percentile(shorts, 99) or missing,
        statistics.fmean(longs) if longs else missing,
        max(longs, default=missing),
        statistics.median(total_rate(played) or 0.0 for played in contender.rounds),
        len(contender.failed),
    )


def verdict(name: str, duels: Sequence[Duel]) -> str:
    """Return which settings our policy beats and loses to."""
    lost = [d.setting for d in duels if d.theirs.at_least_as_good_as(d.ours)]
    won = [d.setting for d in duels if d.ours.at_least_as_good_as(d.theirs)]
    fastest = min(duels, key=lambda duel: duel.theirs.short_p99 / duel.ours.short_p99)
    theirs, ours = fastest.theirs, fastest.ours
    return (
        f"On all of {MEASURES}, {name} beats {_listed(won)} of the settings and loses to "
        f"{_listed(lost)}. Fastest for short prompts is {fastest.setting}: TTFT p99 "
        f"{show(theirs.short_p99, SECONDS)} against ours {show(ours.short_p99, SECONDS)}, mean "
        f"long TTFT {show(theirs.long_mean, SECONDS)} against {show(ours.long_mean, SECONDS)}, "
        f"{show(theirs.tokens_per_s, RATE)} tokens/s against {show(ours.tokens_per_s, RATE)}."
    )


def table(title: str, name: str, duels: Sequence[Duel]) -> Table:
    """Return the table of a load: each setting, then our policy in the same rounds."""
    layout = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    layout.add_column("threshold")
    layout.add_column("")
    for heading in ("short TTFT p50", "p99", "long TTFT mean", "max", "tokens/s", "failed"):
        layout.add_column(heading, justify="right")
    for duel in duels:
        layout.add_row(duel.setting, "vLLM's own", *_cells(duel.theirs))
        layout.add_row("", name, *_cells(duel.ours), end_section=True)
    return layout


def _cells(result: Result) -> list[str]:
    times = (result.short_p50, result.short_p99, result.long_mean, result.long_max)
    shown = [show(value, SECONDS) for value in times]
    return [*shown, show(result.tokens_per_s, RATE), str(result.failed)]


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def main() -> int:
    """Print all figures; return 1 if a worker or a request failed."""
    parser = argparse.ArgumentParser(description="compare our policy with vLLM's option")
    parser.add_argument("--model", help="default: a tiny random Llama")
    parser.add_argument("--ours", default="long_prompt", help="policies, as NAME[+NAME...]")
    parser.add_argument("--longs", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--thresholds", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    console = Console()
    try:
        ours = Side.parse(args.ours)
        model = args.model or str(tiny_model())
        plans = [
            ComparisonPlan(
                model, long_blocks_short(longs=longs, seed=args.seed), args.rounds, lone_samples=0
            )
            for longs in args.longs
        ]
        with ProgressReporter(console) as reporter:
            results = asyncio.run(survey(ours, settings(args.thresholds), plans, reporter))
    except VllmSchedError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    for longs, duels in zip(args.longs, results, strict=True):
        console.print(table(f"{longs} long prompts", ours.name, duels))
        console.print(verdict(ours.name, duels), highlight=False)
        console.print()
    if args.save:
        by_load = [[asdict(duel) for duel in duels] for duels in results]
        text = json.dumps(dict(zip(map(str, args.longs), by_load, strict=True)), indent=1)
        args.save.write_text(text + "\n")
    return int(any(d.ours.failed or d.theirs.failed for duels in results for d in duels))


if __name__ == "__main__":
    sys.exit(main())

"""Compare routers that know each other late with one router.

    python -m benchmarks.stale_routers
    python -m benchmarks.stale_routers --routers 8 --age-ms 0 25 50 100 200 --rates 36

The reference fleet in virtual time: the router's core and its exchange between hosts before plain
workers. Each request comes to a random router. Without an age, routers share nothing. The output
is the same on any machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import mean

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.stale_routers.hosts import USUAL_AGE_S
from benchmarks.stale_routers.play import Figures, Load, Side, mean_of, play

BELOW_KNEE, KNEE = 24.0, 36.0  # requests/s; above, one router's goodput falls
TARGET = 0.98
COLUMNS = (
    "routers", "knowledge", "in time", "requests/s in time", "goodput against one router",
    "short TTFT p50 / p99", "long TTFT p50 / p99", "TPOT p50 / p99", "refused", "most on a worker",
)  # fmt: skip
ONE = Side(1)
Runs = dict[Side, list[Figures]]  # by seed


def sides(counts: Sequence[int], ages_s: Sequence[float]) -> list[Side]:
    """Return the sides: one router first, then each number of routers with and without ages."""
    several = [count for count in counts if count > 1]
    return [ONE, *(Side(count, age) for count in several for age in (*ages_s, None))]


def ratios(runs: Runs, side: Side) -> list[float]:
    """Return a side's goodput against that of one router, by seed."""
    pairs = zip(runs[side], runs[ONE], strict=True)
    return [figures.goodput / alone.goodput for figures, alone in pairs]


def table(rate: float, runs: Runs) -> Table:
    layout = Table(*COLUMNS, box=box.MARKDOWN, title=f"{rate:g} requests/s")
    for side in runs:
        figures = mean_of(runs[side])
        side_ratios = ratios(runs, side)
        layout.add_row(
            str(side.routers),
            "-" if side is ONE else "none" if side.age_s is None else f"{side.age_s * 1e3:g} ms",
            f"{figures.in_time:.1%}",
            f"{figures.goodput:.2f}",
            f"{mean(side_ratios):.3f} ({min(side_ratios):.3f} to {max(side_ratios):.3f})",
            f"{figures.short_p50 * 1e3:.0f} / {figures.short_p99 * 1e3:.0f} ms",
            f"{figures.long_p50:.2f} / {figures.long_p99:.1f} s",
            f"{figures.tpot_p50 * 1e3:.1f} / {figures.tpot_p99 * 1e3:.1f} ms",
            f"{figures.refused:.1%}",
            f"{figures.most:.0f}",
        )
    return layout


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each rate, and the sides that miss the target."""
    args = _parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    played = sides(args.routers, [age / 1e3 for age in args.age_ms])
    loads = [Load(rate, args.seconds, args.max_requests) for rate in args.rates]
    jobs = [(side, load, seed) for load, side, seed in product(loads, played, args.seeds)]
    by_load: dict[Load, Runs] = defaultdict(lambda: defaultdict(list))
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for (side, load, _), figures in zip(jobs, pool.map(play, jobs), strict=True):
            by_load[load][side].append(figures)
    for load, runs in by_load.items():
        console.print(table(load.rate, runs))
        for side in runs:
            if side.age_s is not None and (ratio := mean(ratios(runs, side))) < TARGET:
                age = f"{side.age_s * 1e3:g} ms"
                print(f"{side.routers} routers, {age}: {ratio:.3f}, less than {TARGET:g}: missed")
    return 0


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stale_routers", description=__doc__.splitlines()[0])
    parser.add_argument("--routers", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument(
        "--age-ms",
        nargs="+",
        type=float,
        default=[USUAL_AGE_S * 1e3],
        help="greatest ages of what a router knows of the others (default: %(default)s)",
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[BELOW_KNEE, KNEE])
    parser.add_argument("--max-requests", type=int, metavar="N", help="of a worker")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual seconds per run")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

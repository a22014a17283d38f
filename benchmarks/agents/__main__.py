"""Compare routing rules and policies under the sessions of coding agents.

    python -m benchmarks.agents --fluid
    python -m benchmarks.agents --at-once 24 --seeds 4

Four workers (a 30B mixture of experts on two H200 each) in virtual time behind the router's core:
vLLM's own schedulers, or the fluid engine, which takes a hundredth of the time. A number of
sessions of `agent-coding` is under way; each session that ends is followed by another one. The
output is the same on any machine. `python -m benchmarks.agents.real` plays few on real workers.
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

from rich.console import Console

from benchmarks.agents import report
from benchmarks.agents.play import Load, play
from benchmarks.agents.sides import DEADLINE, ROWS, SIDES
from vllm_sched.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each load, and the goodput where the peers' rule first misses."""
    args = _parse_args(argv)
    try:
        _compare(args)
    except UsageError as error:
        print(f"agents: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(args: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170)
    jobs = [
        (side, Load(args.sessions, at_once, seed, args.fluid, args.slots))
        for at_once, side, seed in product(args.at_once, args.rows, args.seeds)
    ]
    by_load: dict[int, report.RunsBySide] = defaultdict(lambda: defaultdict(list))
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for (side, load), figures in zip(jobs, pool.map(play, jobs), strict=True):
            of_load = by_load[load.at_once]
            of_load[side].append(figures)
            if (side, load.seed) == (args.rows[-1], args.seeds[-1]):
                console.print(report.table(load.at_once, of_load))
    for line in report.verdicts(by_load):
        print(line)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="agents", description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", nargs="+", type=int, default=[16, 20, 24, 28, 32])
    parser.add_argument("--rows", nargs="+", choices=SIDES)
    parser.add_argument("--sessions", type=int, default=200, help="sessions that begin in a run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[4, 5])
    parser.add_argument("--fluid", action="store_true", help="fluid engines, for many runs")
    parser.add_argument("--slots", type=int, help="max_requests of each worker, for all rows")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    if min(args.sessions, *args.at_once, 1 if args.slots is None else args.slots) < 1:
        parser.error("--sessions, --at-once, --slots: must be 1 or more")
    # The fluid engine knows no deadlines.
    args.rows = args.rows or [row for row in ROWS if not (args.fluid and row == DEADLINE)]
    return args


if __name__ == "__main__":
    sys.exit(main())

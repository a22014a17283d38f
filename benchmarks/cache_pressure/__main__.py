"""Compare what the router knows of the caches, when prefixes do not fit into them.

    python -m benchmarks.cache_pressure
    python -m benchmarks.cache_pressure --workers 4 --pressure 2 --seeds 4 5 6

vLLM's own schedulers in virtual time behind the router's core, with step times of an H100. The
router balances load only (`load`), expects prefixes where it sent them (`estimate`), knows the
sessions too (`sessions`), reads the engines' journals (`exact`), or sees the caches at each
decision (`oracle`). The output is the same on any machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Final

from rich.console import Console

from benchmarks.cache_pressure import report
from benchmarks.cache_pressure.play import PREFIXES, SESSIONS, Cell, Figures, play
from benchmarks.cache_pressure.sides import SIDES

# Requests/s per worker of the open loop: near the saturation of `estimate`.
OPEN_LOOP_RATE: Final = 0.65
MANY_WORKERS: Final = 8  # only the target's pressure is played with more
QUICK_S: Final = 60.0


def cells(workers: Sequence[int], pressures: Sequence[float]) -> list[Cell]:
    """Return the cells; those with many workers take longest."""
    target = report.TARGET_PRESSURE
    chosen = []
    for count in workers:
        few = count <= MANY_WORKERS
        chosen += [
            Cell(count, pressure)
            for pressure in pressures
            if few or pressure == target or len(pressures) == 1
        ]
        if few and target in pressures:
            chosen += [Cell(count, target, SESSIONS), Cell(count, target, PREFIXES, OPEN_LOOP_RATE)]
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each cell, and the targets that it misses."""
    args = _parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 130)
    chosen = cells(args.workers, args.pressure)
    jobs = list(product(chosen, SIDES, args.seeds, [args.seconds]))
    by_cell: dict[Cell, dict[str, list[Figures]]] = {}
    missed = 0
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for (cell, side, seed, _), figures in zip(jobs, pool.map(play, jobs), strict=True):
            of_cell = by_cell.setdefault(cell, {})
            of_cell.setdefault(side, []).append(figures)
            if side != SIDES[-1] or seed != args.seeds[-1]:
                continue
            console.print(report.table(cell, of_cell))
            for line, met in report.verdicts(cell, of_cell):
                missed += not met
                console.print(line if met else f"{line}: missed", highlight=False)
    print(f"\n{missed} targets are missed" if missed else "\nall targets are met")
    return 0


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cache_pressure", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--pressure", nargs="+", type=float, default=[1.5, 2.0, 4.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual seconds per run")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--quick", action="store_true", help="one seed for a minute: too short for the targets"
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.workers, args.seeds, args.seconds = args.workers[:1], args.seeds[:1], QUICK_S
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Compare policy variants and baselines in each cell of machine, budget and load.

    python -m benchmarks.frontier --save out/frontier/found.json --plot out/frontier/frontier.svg
    python -m benchmarks.frontier --machines "H100 8B" --budgets 8192 --seeds 5 6 7

Real schedulers in virtual time, asynchronous, with costs measured on GPUs: the output is the same
on any machine. `python -m benchmarks.frontier.real` compares on real workers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

from rich.console import Console

from benchmarks.frontier import report
from benchmarks.frontier.cells import (
    BUDGETS,
    DEFAULT,
    MACHINES,
    UPSTREAM,
    VARIANTS,
    Cell,
    play_cell,
)
from benchmarks.frontier.loads import LOADS
from benchmarks.frontier.play import Figures


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each cell, and the targets that the default policy misses."""
    args = _parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    places = product(args.machines, args.budgets, args.loads)
    cells = [Cell(machine, budget, load) for machine, budget, load in places]
    names = list(dict.fromkeys([UPSTREAM, *args.variants]))
    cell_figures: dict[str, dict[str, list[Figures]]] = {}
    jobs = list(product(cells, names, args.seeds))
    cells_with_misses = 0
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for (cell, name, _), figures in zip(jobs, pool.map(play_cell, jobs), strict=True):
            variants = cell_figures.setdefault(str(cell), {})
            variants.setdefault(name, []).append(figures)
            if name != names[-1] or len(variants[name]) < len(args.seeds):
                continue
            console.print(report.table(str(cell), variants))
            if DEFAULT in names and (missed := report.missed_targets(cell.load, variants)):
                cells_with_misses += 1
                text = f"{DEFAULT} misses: {'; '.join(missed)}"
                console.print(text, style="red", highlight=False)
    if DEFAULT in names:
        met = len(cells) - cells_with_misses
        console.print(f"{DEFAULT} meets its targets in {met} of {len(cells)} cells")
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        content = {
            cell: {name: [asdict(f) for f in seeds] for name, seeds in variants.items()}
            for cell, variants in cell_figures.items()
        }
        args.save.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        report.draw(args.plot.with_suffix(""), cell_figures)
    return 0


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="frontier", description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="a PNG is written next to it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

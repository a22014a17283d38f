"""Measure the cost of our router and of the Rust routers: `make bench-router`.

    python -m benchmarks.router --quick --without-peers
    python -m benchmarks.router --only 1kb-c32 chunks --rounds 9 --save out/bench-router/run.json

Load, mock workers and routers run on this machine, over loopback. With two CPUs or more the routers
run on the last one and everything else on the others, so requests/s compares routers on one CPU;
`--unpinned` leaves that to the kernel. CPU time is that of the router's process tree in the window.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from benchmarks.router import measure, opponents, report
from benchmarks.router.processes import running_on
from benchmarks.router.stage import OURS, Cpus, Side, stage
from benchmarks.router_decision import decision
from proxy.compiled.locate import in_use
from vllm_sched.errors import VllmSchedError

DECISION = "decision"
WORKERS, DECISIONS = 1000, 2000
FOLDER = Path("out/bench-router")
MAX_LOAD_AVERAGE = 1.0  # above it figures are unreliable
TIMEOUT_S = 3600.0
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Print all figures; return 1 if a request through our router or the setup failed."""
    args = _parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 175)
    peers = [] if args.without_peers else [*opponents.ROUND_ROBIN, opponents.HANDING_OVER]
    if args.cache_aware and peers:
        peers += opponents.CACHE_AWARE
    loads = [name for name in measure.LOADS if name in args.only]
    cpus = Cpus() if args.unpinned else Cpus.apart()
    load_average = os.getloadavg()[0]
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with console.status("preparing", refresh_per_second=1) as status:
            if peers and loads:
                status.update(f"installing {' and '.join(opponents.PINS)}")
                opponents.install(FOLDER)
            decision_us = None
            if DECISION in args.only:
                status.update(f"placing requests among {WORKERS:,} workers")
                decision_us = decision(WORKERS, DECISIONS)
            run = _run(loads, peers, cpus, args, status.update)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                sides, results = runner.run(run)
    except (VllmSchedError, TimeoutError) as error:
        console.print(f"bench-router: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    figures = report.figures(results, decision_us)
    wrong = report.errors(results.samples)
    facts = _facts(args, cpus, load_average)
    names = [*dict.fromkeys(side.name for side in sides)] or [OURS]
    console.print(report.table(figures, names, _title(facts)))
    for side, kinds in wrong.items():
        for kind, count in kinds.most_common(5):
            console.print(f"{side}: {count} x {kind}", style="red", markup=False, highlight=False)
    if args.save:
        _save(args.save, facts, figures, results)
    return int(OURS in wrong)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-router", description="measure the cost of our router and of the Rust routers"
    )
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="short windows, as a smoke test")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*measure.LOADS, DECISION],
        default=[*measure.LOADS, DECISION],
        help="some of the measurements; default: all",
    )
    parser.add_argument("--without-peers", action="store_true", help="needs no network")
    parser.add_argument(
        "--cache-aware", action="store_true", help="also the peers' cache-aware policy"
    )
    parser.add_argument("--unpinned", action="store_true", help="no CPU affinity")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all samples as JSON")
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 1 if args.quick else 5
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1 is needed")
    if args.save and not args.save.parent.is_dir():
        parser.error(f"--save {args.save}: there is no folder {args.save.parent}; make it first")
    return args


async def _run(
    loads: Sequence[str],
    peers: Sequence[opponents.Opponent],
    cpus: Cpus,
    args: argparse.Namespace,
    report_progress: Callable[[str], None],
) -> tuple[list[Side], measure.Results]:
    """Start all processes, measure, and stop them."""
    if not loads:
        return [], measure.Results([], {})
    times = measure.QUICK if args.quick else measure.Times()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # routers inherit it
    with running_on(cpus.others):
        async with (
            asyncio.timeout(TIMEOUT_S),
            stage(
                FOLDER,
                peers,
                cpus,
                report_progress,
                combined=not all(measure.LOADS[name].hands_over for name in loads),
                hands_over=any(measure.LOADS[name].hands_over for name in loads),
            ) as sides,
        ):
            results = await measure.measure(sides, loads, args.rounds, times, report_progress)
            return sides, results


def _facts(args: argparse.Namespace, cpus: Cpus, load_average: float) -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "rounds": args.rounds,
        "quick": args.quick,
        "cpus": os.cpu_count(),
        "routers_on": sorted(cpus.routers or ()),
        "others_on": sorted(cpus.others or ()),
        "load_average_before": load_average,
        "python": platform.python_version(),
        "compiled": in_use(),
        "peers": [] if args.without_peers else opponents.PINS,
    }


def _title(facts: dict[str, Any]) -> str:
    """Return the title of the table."""
    affinity = "all on any CPU"
    if facts["routers_on"]:
        affinity = "routers on CPU {routers_on}, load and mock workers on {others_on}".format(
            **facts
        )
    load = facts["load_average_before"]
    warning = " (BUSY: measure again)" if load > MAX_LOAD_AVERAGE else ""
    modules = "compiled" if facts["compiled"] else "plain"
    before = f"load average before: {load:.1f}{warning}"
    return f"Medians of {facts['rounds']} rounds; {modules} modules; {affinity}; {before}"


def _save(
    path: Path, facts: dict[str, Any], figures: Sequence[report.Figure], results: measure.Results
) -> None:
    lines = [dataclasses.asdict(figure) | {"met": figure.met} for figure in figures]
    everything = {"facts": facts, "figures": lines, **dataclasses.asdict(results)}
    path.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

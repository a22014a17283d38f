"""`make bench-router`: what our router costs beside the Rust ones, against the targets.

    python -m benchmarks.router --quick --without-peers
    python -m benchmarks.router --only 1kb-c32 chunks --rounds 9 --save out/bench-router/run.json

Load, mock workers and routers run on this machine, over loopback. With two CPUs or more the
routers have the last one to themselves and everything else has the others, so that requests/s
compares what each router does with one CPU; `--unpinned` leaves that to the kernel. The CPU time
is that of the router's whole process tree during the window.
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
BUSY = 1.0  # load average above which the figures are worth little
LONGEST_S = 3600.0
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a request through our router failed, or nothing could be run."""
    args = _arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 175)
    peers = [] if args.without_peers else [*opponents.ROUND_ROBIN, opponents.HANDING_OVER]
    if args.cache_aware and peers:
        peers += opponents.CACHE_AWARE
    loads = [name for name in measure.LOADS if name in args.only]
    cpus = Cpus() if args.unpinned else Cpus.apart()
    busy = os.getloadavg()[0]
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
    found = report.figures(results, decision_us)
    wrong = report.errors(results.samples)
    facts = _facts(args, cpus, busy)
    names = [*dict.fromkeys(side.name for side in sides)] or [OURS]
    console.print(report.table(found, names, _title(facts)))
    for side, kinds in wrong.items():
        for kind, count in kinds.most_common(5):
            console.print(f"{side}: {count} x {kind}", style="red", markup=False, highlight=False)
    if args.save:
        _save(args.save, facts, found, results)
    return int(OURS in wrong)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-router", description="what our router costs beside the Rust ones"
    )
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="short windows, to see that it runs")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*measure.LOADS, DECISION],
        default=[*measure.LOADS, DECISION],
        help="some of the measurements; default: all",
    )
    parser.add_argument("--without-peers", action="store_true", help="needs no network")
    parser.add_argument("--cache-aware", action="store_true", help="the peers' other policy too")
    parser.add_argument("--unpinned", action="store_true", help="let everything run on any CPU")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all of it as JSON")
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
    tell: Callable[[str], None],
) -> tuple[list[Side], measure.Results]:
    """Put everything in place, measure, and take it away again."""
    if not loads:
        return [], measure.Results([], {})
    times = measure.QUICK if args.quick else measure.Times()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # routers inherit it
    with running_on(cpus.others):
        async with (
            asyncio.timeout(LONGEST_S),
            stage(
                FOLDER,
                peers,
                cpus,
                tell,
                whole=not all(measure.LOADS[name].hands_over for name in loads),
                hands_over=any(measure.LOADS[name].hands_over for name in loads),
            ) as sides,
        ):
            return sides, await measure.measure(sides, loads, args.rounds, times, tell)


def _facts(args: argparse.Namespace, cpus: Cpus, load_average: float) -> dict[str, Any]:
    """Say what the figures depend on."""
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
    """Write the same for people."""
    where = "all on any CPU"
    if facts["routers_on"]:
        where = "routers on CPU {routers_on}, load and mock workers on {others_on}".format(**facts)
    load = facts["load_average_before"]
    warning = " (BUSY: measure again)" if load > BUSY else ""
    modules = "compiled" if facts["compiled"] else "plain"
    before = f"load average before: {load:.1f}{warning}"
    return f"Medians of {facts['rounds']} rounds; {modules} modules; {where}; {before}"


def _save(
    path: Path, facts: dict[str, Any], found: Sequence[report.Figure], results: measure.Results
) -> None:
    lines = [dataclasses.asdict(figure) | {"met": figure.met} for figure in found]
    everything = {"facts": facts, "figures": lines, **dataclasses.asdict(results)}
    path.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

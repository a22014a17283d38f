"""Compare a short and a long worker with a short one alone, under short prompts only.

    python -m benchmarks.both_pools --rounds 5 --save out/both-pools.json

Two equal workers of the tiny model have a processor each. A closed loop of short prompts runs
through a router of both workers and through a router of the short one, in alternating order. The
concurrency is the same, enough for two workers, and no limit queues requests. Prompts are new and
prefix caches are off. Only requests that end while all lanes are busy count.

For comparison each round also loads both workers directly, each with half of the loop. Client and
router share the workers' processors. 6 GB of memory; nothing else should run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.policies import promise
from benchmarks.policies.promise import Promise
from benchmarks.router.processes import cpu_seconds, tree
from proxy.config import FleetConfig, LaunchConfig, WorkerConfig
from vllm_sched.bench.client.endpoint import Endpoint, EndpointOptions, probe_endpoint
from vllm_sched.bench.client.player import PlayedRun, play
from vllm_sched.bench.compare.compare import PAUSE_BETWEEN_SIDES_S, ProgressReporter, running
from vllm_sched.bench.traffic.fixed import Fixed
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.cli.fleet.demo import router_of
from vllm_sched.cli.fleet.up import assign_ports, make_worker
from vllm_sched.errors import UsageError, VllmSchedError
from vllm_sched.workers.launch import Worker

FLAGS: Final = (
    "--max-model-len=16384", "--max-num-batched-tokens=512", "--num-gpu-blocks-override=2048",
    "--no-enable-prefix-caching",
)  # fmt: skip
ROLES: Final = ("short", "long")
ALONE, BOTH, DIRECT = "the short one alone", "short and long", "both, without a router"
TARGET: Final = 1.8
SETTLE_S: Final = 3.0  # not counted, because all lanes start at once
WARM_UP_S: Final = 12.0
MAX_LOAD_AVERAGE: Final = 1.0  # above it figures are unreliable


@dataclass(frozen=True)
class Load:
    """The load, which is the same for all sides."""

    prompt: int
    output: int
    concurrency: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class Side:
    """The URLs that share a closed loop: one router, or both workers."""

    name: str
    urls: Sequence[str]
    router: Worker | None = None


@dataclass(frozen=True)
class Rate:
    """The figures of a side in one round."""

    requests_per_s: float
    tokens_per_s: float  # prompt and output
    counted: int  # requests
    by_worker: Mapping[str, int]  # requests, if there is a router
    beside: float  # processors used by client and router
    failed: Sequence[str] = ()
    warnings: Sequence[str] = ()


def fleet(cpus: Sequence[int]) -> FleetConfig:
    """Return both workers, which differ only in their roles."""
    if len(cpus) < len(ROLES):
        raise UsageError("both_pools: two processors are needed; this machine offers one")
    workers = tuple(
        WorkerConfig.model_validate(
            {
                "name": f"{role}-0",
                "role": role,
                "launch": LaunchConfig(model="tiny", args=FLAGS, cpus=(cpu,)),
            }
        )
        for role, cpu in zip(ROLES, cpus, strict=False)
    )
    return assign_ports(FleetConfig(model="tiny", workers=workers))


def sides(config: FleetConfig, folder: Path) -> list[Side]:
    short = config.model_copy(update={"workers": config.workers[:1]})
    alone, both = router_of(short, folder, "alone"), router_of(config, folder, "both")
    return [
        Side(ALONE, [alone.url], alone),
        Side(BOTH, [both.url], both),
        Side(DIRECT, [str(worker.url) for worker in config.workers]),
    ]


async def measure(
    side: Side, endpoints: Sequence[Endpoint], load: Load, number: int, seconds: float
) -> Rate:
    """Run the loop, divided among a side's endpoints, and return its rate."""
    share, rest = divmod(load.concurrency, len(endpoints))
    lanes = [share + (index < rest) for index in range(len(endpoints))]
    source = Fixed(f"{load.prompt}x{load.output}")
    pids = tree(side.router.pid) if side.router and side.router.pid else []
    used = cpu_seconds(pids)
    played = await asyncio.gather(
        *(
            play(
                endpoint,
                Schedule(source=source, seed=load.seed, concurrency=count, duration_s=seconds),
                salt=f"{side.name}/{number}/{index}",
            )
            for index, (endpoint, count) in enumerate(zip(endpoints, lanes, strict=True))
        )
    )
    used = cpu_seconds(pids) - used
    return rate(played, min(SETTLE_S, seconds / 2), seconds, used)


def rate(played: Sequence[PlayedRun], since: float, until: float, router_s: float) -> Rate:
    """Return the rate of the requests that ended between `since` and `until`."""
    outcomes = [outcome for run in played for outcome in run.outcomes]
    counted = [outcome for outcome in outcomes if outcome.good and since < outcome.end <= until]
    longest = max(run.duration for run in played)
    return Rate(
        requests_per_s=len(counted) / (until - since),
        tokens_per_s=sum(e.prompt_tokens + e.completed for e in counted) / (until - since),
        counted=len(counted),
        by_worker=dict(Counter(outcome.worker for outcome in counted)),
        # Each loop reports the CPU time of the whole process.
        beside=max(run.busy for run in played) + router_s / longest,
        failed=[outcome.error for outcome in outcomes if outcome.error],
        warnings=sorted({warning for run in played for warning in run.warnings()}),
    )


async def run(load: Load, rounds: int, reporter: ProgressReporter) -> dict[str, list[Rate]]:
    """Start all processes, warm each side up and measure the sides in turns."""
    by_side: dict[str, list[Rate]] = {ALONE: [], BOTH: [], DIRECT: []}
    with tempfile.TemporaryDirectory(prefix="both-pools-") as name:
        folder = Path(name)
        config = fleet(sorted(os.sched_getaffinity(0)))
        workers = [make_worker(config, worker, folder, folder) for worker in config.workers]
        measured_sides = sides(config, folder)
        routers = [side.router for side in measured_sides if side.router]
        async with running(workers, reporter), running(routers, reporter):
            endpoints = {
                side.name: [
                    await probe_endpoint(EndpointOptions(url, explain=True)) for url in side.urls
                ]
                for side in measured_sides
            }
            for number in range(rounds + 1):
                for side in measured_sides if number % 2 else reversed(measured_sides):
                    what = f"round {number} of {rounds}" if number else "warming up"
                    reporter.step(f"{what}, {side.name}")
                    # vLLM's processes busy-wait for a second after a step.
                    await asyncio.sleep(PAUSE_BETWEEN_SIDES_S)
                    for worker in (*workers, *routers):
                        worker.check()
                    seconds = load.seconds if number else min(WARM_UP_S, load.seconds)
                    measured = await measure(side, endpoints[side.name], load, number, seconds)
                    if number:
                        by_side[side.name].append(measured)
    return by_side


def ratios(ours: Sequence[Rate], theirs: Sequence[Rate], figure: str) -> list[float]:
    """Return the ratios of two sides' rounds, without rounds in which no request ended."""
    return [
        getattr(one, figure) / getattr(other, figure)
        for one, other in zip(ours, theirs, strict=True)
        if getattr(other, figure)
    ]


def promises(by_side: Mapping[str, Sequence[Rate]]) -> list[Promise]:
    """Return the promises, and the ratios to both workers without a router."""
    alone, both, direct = by_side[ALONE], by_side[BOTH], by_side[DIRECT]
    requests = "requests_per_s"
    return [
        Promise(
            "requests/s over both, to the short one alone, median of the rounds",
            _middle(ratios(both, alone, requests)),
            at_least=TARGET,
        ),
        Promise(
            "tokens/s over both, to the short one alone",
            _middle(ratios(both, alone, "tokens_per_s")),
            at_least=TARGET,
        ),
        Promise(
            "requests/s of both without a router, to the short one alone, for comparison",
            _middle(ratios(direct, alone, requests)),
        ),
        Promise(
            "requests/s over both, to both without a router, for comparison",
            _middle(ratios(both, direct, requests)),
        ),
    ]


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def table(by_side: Mapping[str, Sequence[Rate]]) -> Table:
    """Return the table of all rounds and their medians."""
    layout = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    layout.add_column("round")
    layout.add_column("")
    for heading in ("requests/s", "tokens/s", "counted", "to alone", "client and router"):
        layout.add_column(heading, justify="right")
    layout.add_column("by worker")
    rounds = len(by_side[ALONE])
    for number in range(rounds):
        for name, rates in by_side.items():
            measured, alone = rates[number], by_side[ALONE][number]
            to_alone = (
                measured.requests_per_s / alone.requests_per_s if alone.requests_per_s else None
            )
            layout.add_row(
                str(number + 1),
                name,
                f"{measured.requests_per_s:.2f}",
                f"{measured.tokens_per_s:,.0f}",
                str(measured.counted),
                "-" if to_alone is None else f"{to_alone:.2f}x",
                f"{measured.beside:.0%} of one CPU",
                ", ".join(f"{name} {n}" for name, n in sorted(measured.by_worker.items()) if name),
                end_section=name == DIRECT,
            )
    for name, rates in by_side.items():
        layout.add_row(
            "median",
            name,
            f"{statistics.median(measured.requests_per_s for measured in rates):.2f}",
            f"{statistics.median(measured.tokens_per_s for measured in rates):,.0f}",
        )
    return layout


def main(argv: Sequence[str] | None = None) -> int:
    """Print all figures; return 1 if a request failed."""
    args = _parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    load = Load(args.prompt, args.output, args.concurrency, args.seconds, args.seed)
    load_average = os.getloadavg()[0]
    try:
        with ProgressReporter(console) as reporter:
            by_side = uvloop.run(run(load, args.rounds, reporter))
    except VllmSchedError as error:
        console.print(f"both_pools: {error}", style="red", markup=False, highlight=False)
        return 1
    judged = promises(by_side)
    console.print(table(by_side))
    console.print(promise.table("short prompts only, two workers and one", judged))
    all_rates = [measured for rates in by_side.values() for measured in rates]
    warnings = {warning for measured in all_rates for warning in measured.warnings}
    if load_average > MAX_LOAD_AVERAGE:
        warnings.add(f"load average {load_average:.1f} at the start")
    for warning in sorted(warnings):
        console.print(warning, style="yellow", highlight=False)
    failed = [error for measured in all_rates for error in measured.failed]
    if failed:
        console.print(f"{len(failed)} failed, one of them: {failed[0]}", style="red", markup=False)
    if args.save:
        content = {
            "load": asdict(load),
            "rounds": {
                name: [asdict(measured) for measured in rates] for name, rates in by_side.items()
            },
            "promises": promise.to_json(judged),
        }
        args.save.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(failed))


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="both_pools", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--seconds", type=float, default=20.0, help="per side and round")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens")
    parser.add_argument("--output", type=int, default=8, help="tokens")
    parser.add_argument("--seed", type=int, default=0, help="fixes the prompts")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write the figures as JSON")
    args = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("concurrency", 2), ("prompt", 1), ("output", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: at least {least} is needed")
    if args.seconds <= SETTLE_S:
        parser.error(f"--seconds {args.seconds:g}: more than {SETTLE_S:g} are needed")
    if args.save and not args.save.parent.is_dir():
        parser.error(f"--save {args.save}: there is no folder {args.save.parent}; make it first")
    return args


if __name__ == "__main__":
    sys.exit(main())

"""`vllm-sched sweep`: measure an endpoint at rising loads."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from vllm_sched.bench.client.endpoint import Endpoint
from vllm_sched.bench.client.player import PlayedRun, RunProgress, play
from vllm_sched.bench.results import goodput
from vllm_sched.bench.results.knee import explore_concurrencies, explore_rates, kept_up
from vllm_sched.bench.results.summary import summary
from vllm_sched.bench.sweep import CONCURRENCY, RATE, Point, Sweep
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.sampled import without_end
from vllm_sched.bench.traffic.schedule import MAX_REQUESTS, Schedule
from vllm_sched.cli.bench.load import (
    WORKLOAD_HELP,
    add_endpoint,
    add_traffic,
    check_endpoint,
    check_outputs,
    endpoint_options,
    play_with_progress,
    run_interruptibly,
    salt_of,
    traffic_of,
)
from vllm_sched.cli.exits import INTERRUPTED
from vllm_sched.cli.output import Output
from vllm_sched.errors import UsageError
from vllm_sched.files import write_whole

AUTO = "auto"


def describe(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="play workloads at rising loads and draw the curves",
        description=(
            "Run `bench` at several rates or concurrencies and seeds; print and draw goodput "
            "against rate, and throughput against concurrency with its knee."
        ),
    )
    add_endpoint(parser)
    parser.add_argument(
        "--workload",
        dest="workloads",
        action="append",
        metavar="NAME|FILE",
        help=f"repeatable, one curve each: {WORKLOAD_HELP}".replace("%(default)s", "azure-conv"),
    )
    parser.add_argument(
        "--request-rates",
        metavar="R,R,...|auto",
        help="requests per second; auto doubles the rate until the endpoint can't keep up "
        "(default: auto)",
    )
    parser.add_argument(
        "--concurrencies",
        metavar="C,C,...|auto",
        help="concurrent requests; auto doubles the number until throughput stops growing",
    )
    parser.add_argument(
        "--start", type=float, default=1.0, metavar="X", help="first load of auto (default: 1)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="runs per load (default: 3)"
    )
    add_traffic(parser, lasts="60; a trace is sampled in stretches from all parts, repeatedly")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write every run's figures")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the curves")
    parser.set_defaults(func=run_sweep)


def run_sweep(args: argparse.Namespace) -> int:
    """Run the command; return 1 if no request completed."""
    targets = goodput.parse(args.goodput)
    if args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds}: must be at least 1; leave it out for 3")
    if not 0 < args.start < math.inf:
        raise UsageError(f"--start {args.start:g}: must be a number above 0")
    plans = _plans(args)
    check_outputs(args.save, args.plot)
    console = Output()
    sweep = Sweep()
    endpoint = check_endpoint("sweep", endpoint_options(args))
    for doubt in endpoint.doubts:
        console.print_text(doubt, "yellow")
    runner = partial(_Runner, args, salt_of(args), targets, endpoint, sweep, console)
    stopped = run_interruptibly(lambda stop: runner(stop).run(plans))
    if stopped and not sweep.points:
        raise KeyboardInterrupt  # keep older results
    if stopped:
        console.print_text("interrupted: partial results", "yellow")
    console.print_table(sweep.table(targets=bool(targets)))
    _print_knees(sweep, console, targets=bool(targets))
    content = sweep.to_json() | {"goodput_targets_ms": targets.as_ms()}
    console.save(args.save, lambda path: write_whole(path, json.dumps(content) + "\n"))
    if args.plot:
        from vllm_sched.bench.plots import draw_sweep

        draw = partial(
            draw_sweep,
            goodput=sweep.curves(RATE, "goodput"),
            ttft=sweep.curves(RATE, "ttft_p99_ms"),
            throughput=sweep.curves(CONCURRENCY, "tokens"),
            targets=targets.as_ms(),
        )
        console.save(args.plot, draw, "drew")
    if stopped:
        return INTERRUPTED
    return int(not any(point.figures["completed"] for point in sweep.points))


@dataclass(frozen=True)
class _Plan:
    """One curve: a workload and its loads; without loads, they are searched for."""

    schedule: Schedule
    axis: str
    loads: tuple[float, ...]

    @property
    def rates(self) -> tuple[float, float]:
        """The lowest and the highest rate that can be played in the given time."""
        end = self.schedule.ends_after_s
        if end is None:
            return 0.0, math.inf
        return 1 / end, math.inf if self.schedule.count else MAX_REQUESTS / end

    def schedule_at(self, load: float) -> Schedule:
        if self.axis == RATE:
            return self.schedule.at_rate(load)
        return self.schedule.at_concurrency(int(load))

    def label_of(self, load: float, seed: int) -> str:
        unit = "requests/s" if self.axis == RATE else "at once"
        return f"{self.schedule.source.name} at {load:g} {unit}, seed {seed}"


@dataclass(frozen=True)
class _Runner:
    args: argparse.Namespace
    salt: str
    targets: goodput.Targets
    endpoint: Endpoint
    sweep: Sweep
    console: Output
    stop: asyncio.Event

    async def run(self, plans: Sequence[_Plan]) -> bool:
        """Play the plans; return True if the user stopped the sweep."""
        for plan in plans:
            measure = partial(self._measure, plan)
            try:
                if plan.loads:
                    for load in plan.loads:
                        await measure(load)
                elif plan.axis == RATE:
                    await explore_rates(measure, self.args.start, *plan.rates)
                else:
                    await explore_concurrencies(measure, max(1.0, round(self.args.start)))
            except _StoppedError:
                return True
        return False

    async def _measure(self, plan: _Plan, load: float) -> float:
        """Play a load with every seed; return the mean of the figure that the search uses."""
        searched = []
        name = plan.schedule.source.name
        salt = f"{self.salt}/{name}/{plan.axis}/{load:g}"
        for seed in range(self.args.seeds):
            schedule, label = replace(plan.schedule_at(load), seed=seed), plan.label_of(load, seed)
            played = await play_with_progress(
                self.console, "sweep", label, schedule, partial(self._play, schedule, salt)
            )
            if played.interrupted:  # half a run has another load than its label says
                raise _StoppedError
            figures = summary(played.outcomes, played.duration, self.targets)
            follows = kept_up(played.outcomes) if plan.axis == RATE else 1.0
            point = Point(name, plan.axis, load, seed, figures, follows)
            self.sweep.points.append(point)
            searched.append(point.share if plan.axis == RATE else point.tokens)
            for warning in played.warnings():
                self.console.print_text(f"{label}: {warning}", "yellow")
        return fmean(searched)

    async def _play(self, schedule: Schedule, salt: str, progress: RunProgress) -> PlayedRun:
        timeout_s, stop = self.args.timeout, self.stop
        return await play(
            self.endpoint, schedule, salt=salt, timeout_s=timeout_s, progress=progress, stop=stop
        )


class _StoppedError(Exception):
    """The user stopped the sweep."""


def _plans(args: argparse.Namespace) -> list[_Plan]:
    rates, concurrencies = args.request_rates, args.concurrencies
    if rates is None and concurrencies is None:
        rates = AUTO
    plans: list[_Plan] = []
    for name in args.workloads or ["azure-conv"]:
        source = find(name, block_tokens=args.block_tokens)
        if any(source.name == plan.schedule.source.name for plan in plans):
            raise UsageError(
                f"--workload {name}: there is already a workload {source.name}, and both would "
                "have the same label; rename the file, or leave it out"
            )
        # A trace could end before a queue builds up.
        endless = without_end(source, random.Random(0))
        schedule = Schedule(source=endless, **traffic_of(args))
        if rates is not None:
            plans.append(_Plan(schedule, RATE, _loads("--request-rates", rates, whole=False)))
            for load in plans[-1].loads or (args.start,):
                plans[-1].schedule_at(load).arrivals()  # raises before anything is measured
        if concurrencies is not None:
            loads = _loads("--concurrencies", concurrencies, whole=True)
            for load in loads:
                schedule.at_concurrency(int(load))
            plans.append(_Plan(schedule, CONCURRENCY, loads))
    return plans


def _loads(option: str, words: str, *, whole: bool) -> tuple[float, ...]:
    if words == AUTO:
        return ()
    loads = []
    for word in words.split(","):
        try:
            load = float(int(word)) if whole else float(word)
        except (ValueError, OverflowError):
            load = 0.0
        if not 0 < load < float("inf"):
            kind = "whole numbers" if whole else "numbers"
            raise UsageError(f"{option} {words}: {word!r} is not a load; give {kind} > 0, or auto")
        loads.append(load)
    return tuple(sorted(set(loads)))


def _print_knees(sweep: Sweep, console: Output, *, targets: bool) -> None:
    for name, rate in sweep.knees(RATE).items():
        what = "in time" if targets else "kept up with"
        words = f"{rate:g} requests/s are {what}" if rate else f"no rate was {what}"
        console.print_text(f"{name}: {words}", "")
    for name, concurrency in sweep.knees(CONCURRENCY).items():
        tokens = sweep.figures(CONCURRENCY, "tokens")[name]
        if concurrency is not None:
            words = f"more than {concurrency:g} concurrent requests gain less than a tenth"
        elif any(any(values) for values in tokens.values()):
            highest = max(tokens)
            words = f"throughput still grows at {highest:g} concurrent requests, the most measured"
        else:
            words = "no request completed"
        console.print_text(f"{name}: {words}", "")

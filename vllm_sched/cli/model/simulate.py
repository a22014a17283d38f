"""`vllm-sched simulate`: play a workload against a fleet in virtual time."""

from __future__ import annotations

import argparse
import gc
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from proxy.config import FleetConfig
from proxy.errors import ConfigError, Problem
from vllm_sched.bench.results import goodput
from vllm_sched.bench.results.result import BenchResult
from vllm_sched.bench.results.sessions import cut_warning, unfinished_warning
from vllm_sched.bench.results.summary import show_number
from vllm_sched.bench.traffic.schedule import MAX_NUMBER, Schedule
from vllm_sched.cli.bench.bench import print_errors, print_tables
from vllm_sched.cli.bench.load import (
    add_traffic,
    add_workload,
    check_outputs,
    requests_of,
    require_ended,
    require_requests,
    save_and_draw,
    schedule_of,
)
from vllm_sched.cli.exits import INTERRUPTED, interruptible
from vllm_sched.cli.fleet import fleet as fleet_file
from vllm_sched.cli.output import Output, require_folders, writing
from vllm_sched.cli.progress_bar import progress, terminal
from vllm_sched.cost import profiles
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.exact_engine import ExactEngine, require_vllm
from vllm_sched.sim.engines.policy_effects import declared_effects
from vllm_sched.sim.fleet.fleet import TIMEOUT_S, PlayedFleet, SimulatedFleet
from vllm_sched.sim.fleet.models import GPU_BANDWIDTH, AssumedWorker, worker_models
from vllm_sched.sim.types import MakeEngine, WorkerModel

EXACT, FLUID = "exact", "fluid"
ENGINES: Final = (EXACT, FLUID)
MAX_DRAWN_WORKERS: Final = 8
# Above this the fluid engine reports only first tokens and ends: a list of all gaps is too long.
MAX_FINE_REQUESTS: Final = 50_000


def describe(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="play a workload against a fleet in virtual time",
        description=(
            "Simulate a workload on a fleet that need not exist: the real router core and the real "
            "policies run in virtual time; steps and transfers follow cost models. Figures, JSON "
            "and pictures are those of `bench`."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("fleet", type=Path, metavar="FLEET.yaml", help="the fleet file")
    parser.add_argument(
        "--engine",
        default=EXACT,
        choices=ENGINES,
        help="exact: real vLLM schedulers; fluid: a plain model, faster (default: %(default)s)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME|FILE",
        help=f"for workers without a profile: {profiles.USAGE}, or a file of `calibrate`",
    )
    parser.add_argument(
        "--front-ms",
        type=float,
        metavar="MS",
        help="time that HTTP, router and tokenizer add to each request (default: the value that "
        "`calibrate` measured for the worker alone, otherwise 0)",
    )
    add_link(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="a client disconnects after this time (default: %(default)g)",
    )
    add_workload(parser)
    add_traffic(parser)
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write every sample")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="draw TTFT, ITL, tenants, routing decisions and, with exact engines, the content of "
        "each step",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a trace for Perfetto (for long runs the last part of each worker)",
    )
    parser.set_defaults(func=run_simulate)


def add_link(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth of the link to each worker, for hand-overs "
        f"(default: {GPU_BANDWIDTH / 1e9:g} per GPU)",
    )
    parser.add_argument(
        "--mixed-ms",
        type=float,
        metavar="MS",
        help="extra time of a step with decode and prefill (default: from the profile; 0 in all "
        "built-in profiles, because no value is published)",
    )


@dataclass(frozen=True)
class SimulationInput:
    """The checked arguments."""

    engine: str
    config: FleetConfig
    models: Mapping[str, WorkerModel]
    schedule: Schedule
    targets: goodput.Targets

    @property
    def coarse(self) -> bool:
        """Whether there are too many requests to report each token; never in a closed loop."""
        schedule = self.schedule
        counts = [float(n) for n in (schedule.count, schedule.source.count) if n is not None]
        if (end := schedule.ends_after_s) is not None and schedule.offered_rate is not None:
            counts.append(schedule.offered_rate * end)
        return self.engine == FLUID and min(counts, default=0) > MAX_FINE_REQUESTS


@dataclass(frozen=True)
class SimulationRun:
    played: PlayedFleet
    fleet: SimulatedFleet
    wall_s: float
    cpu_s: float

    @property
    def speed(self) -> float:
        """Virtual seconds per real second."""
        return self.played.duration / self.wall_s if self.wall_s else 0.0

    @property
    def scheduler_share(self) -> float | None:
        """The share of time spent in vLLM's schedulers; None without exact engines."""
        workers: Mapping[str, Mapping[str, Any]] = self.played.facts["workers"]
        spent = [worker["scheduler_s"] for worker in workers.values() if "scheduler_s" in worker]
        return sum(spent) / self.wall_s if spent and self.wall_s else None


def run_simulate(args: argparse.Namespace) -> int:
    """Run the command; return 1 if a request failed."""
    inputs = _check(args)
    console = Output()
    run = _run(args, inputs, console)
    if run.played.interrupted:
        require_ended(run.played.outcomes)
    result = as_result(run, inputs)
    if run.played.interrupted:
        console.print_text("interrupted: partial results", "yellow")
    else:
        require_requests(result)
    print_tables(result, console)
    _print_result(console, result, run)
    save_and_draw(result, args, console)
    console.save(args.plot, partial(draw_steps_of, run.fleet, run.played.duration), "drew")
    if args.trace:
        from vllm_sched.sim.fleet.perfetto import write

        with writing(args.trace):
            write(args.trace, run.fleet.engines, result.outcomes, run.played.duration)
        console.print_text(f"wrote {args.trace}: open it at ui.perfetto.dev")
    if run.played.interrupted:
        return INTERRUPTED
    return int(any(outcome.error for outcome in result.outcomes))


def _check(args: argparse.Namespace) -> SimulationInput:
    config = fleet_file.read(args.fleet)
    _check_numbers(args)
    assumed = AssumedWorker(
        profile=args.profile,
        front_ms=args.front_ms,
        gb_per_s=args.bandwidth,
        mixed_ms=args.mixed_ms,
    )
    if args.profile is not None and config.workers and all(w.profile for w in config.workers):
        raise UsageError(
            f"--profile {args.profile}: has no effect, because every worker in {args.fleet} has a "
            "profile of its own; change those, or leave the option out"
        )
    models = worker_models(config, args.fleet, assumed)
    if not any(config.model_of(worker) == config.model for worker in config.workers):
        why = f"{config.model!r}: requests ask for this model, and no worker serves it; change it"
        raise ConfigError(str(args.fleet), [Problem("model", why)])
    schedule = schedule_of(args)
    check_outputs(args.save, args.plot)
    require_folders(args.trace)
    targets = goodput.parse(args.goodput)
    inputs = SimulationInput(args.engine, config, models, schedule, targets)
    if targets.itl is not None and inputs.coarse:
        raise UsageError(
            f"--goodput itl: above {MAX_FINE_REQUESTS:,} requests the fluid engine records no gaps "
            "between tokens; play fewer requests, or leave itl out"
        )
    return inputs


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("front_ms", "mixed_ms", "timeout", "bandwidth"):
        value, may_be_zero = getattr(args, name), name in ("front_ms", "mixed_ms")
        if value is None or 0 < value <= MAX_NUMBER or (may_be_zero and not value):
            continue
        minimum = "0 or more" if may_be_zero else "more than 0"
        raise UsageError(
            f"--{name.replace('_', '-')} {value:g}: must be a number, {minimum}, at most "
            f"{MAX_NUMBER:g}"
        )


def engine_maker(name: str, *, traced: bool = False, each_token: bool = True) -> MakeEngine:
    """Return a function that makes engines; with `each_token`, fluid engines report every gap."""
    if name == EXACT:
        require_vllm("--engine exact", "use --engine fluid")
        return partial(ExactEngine, traced=traced)
    from vllm_sched.sim.engines.fluid_engine import FluidEngine

    return partial(FluidEngine, each_token=each_token)


def _run(args: argparse.Namespace, inputs: SimulationInput, console: Output) -> SimulationRun:
    schedule, coarse = inputs.schedule, inputs.coarse
    # vLLM's warnings on this machine do not apply to the simulated one.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    if args.engine == EXACT and (place := terminal(console)) is not None:
        place.print("loading vLLM's scheduler", style="dim")
    maker = engine_maker(args.engine, traced=bool(args.trace or args.plot), each_token=not coarse)
    fleet = SimulatedFleet(
        inputs.config, inputs.models, maker, timeout_s=args.timeout, coarse=coarse
    )
    # Keep the garbage collector from scanning these long-lived objects again and again.
    gc.collect()
    gc.freeze()
    began, cpu = time.perf_counter(), time.process_time()
    try:
        total = schedule.ends_after_s or requests_of(schedule)
        more = f", workers: {len(inputs.models):,}, {args.engine} engine"
        with (
            progress(console, "simulate", schedule.source.name, total, more=more) as show,
            interruptible() as stopped,
        ):

            def report_progress(now: float, sent: int, done: int, *, last: bool = False) -> None:
                text = f"{now:,.0f} virtual s, {done:,} done, {sent - done:,} in flight"
                show(now if schedule.ends_after_s else done, text, last=last)

            played = fleet.play(schedule, report_progress, stopped)
            ended = sum(not outcome.interrupted for outcome in played.outcomes)
            report_progress(played.duration, len(played.outcomes), ended, last=True)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    finally:
        gc.unfreeze()
    return SimulationRun(played, fleet, wall_s, cpu_s)


def draw_steps_of(fleet: SimulatedFleet, played_until: float, folder: Path) -> list[Path]:
    """Draw the steps of the first workers with a trace; return the files."""
    from vllm_sched.bench.plots.steps import draw_steps, steps_of
    from vllm_sched.bench.plots.style import files
    from vllm_sched.sim.fleet.perfetto import TracedEngine

    drawn: list[Path] = []
    for name, engine in list(fleet.engines.items())[:MAX_DRAWN_WORKERS]:
        if isinstance(engine, TracedEngine) and (
            steps := steps_of(engine.trace_events(played_until))
        ):
            stem = folder / f"steps-{name}"
            draw_steps(stem, f"Tokens per step against the budget, {name}", steps)
            drawn += files(stem)
    return drawn


def as_result(run: SimulationRun, inputs: SimulationInput) -> BenchResult:
    played = run.played
    return BenchResult(
        schedule=inputs.schedule,
        targets=inputs.targets,
        outcomes=played.outcomes,
        duration=played.duration,
        backend=f"simulated-{inputs.engine}",
        model=inputs.config.model,
        notes={
            "max_model_len": run.fleet.longest,
            "cut_requests": played.cut,
            "simulator": {
                "engine": inputs.engine,
                "wall_s": run.wall_s,
                "cpu_s": run.cpu_s,
                "speed": run.speed,
                "scheduler_share": run.scheduler_share,
                "profiles": {name: model.profile for name, model in inputs.models.items()},
                **played.facts,
            },
        },
        warnings=_warnings(inputs, played.cut) + unfinished_warning(played.sessions),
        sessions=played.sessions,
    )


def _warnings(inputs: SimulationInput, cut: int) -> list[str]:
    models, schedule = inputs.models, inputs.schedule
    warnings = schedule.falls_short
    if cut:
        warnings.append(cut_warning(cut, "fleet", sessions=schedule.source.has_sessions))
    if inputs.engine == FLUID:
        warnings += [
            f"--engine fluid ignores {text}; use --engine exact" for text in _ignored(models)
        ]
    warnings += [
        f"{model.name} is simulated without {', '.join(model.unread)}"
        for model in models.values()
        if model.unread
    ]
    names = {f"tenant-{number + 1}" for number in range(schedule.tenants)}
    if strangers := names - {tenant.name for tenant in inputs.config.tenants}:
        warnings.append(
            f"{len(strangers)} of --tenants {schedule.tenants} (named tenant-1 and so on) are not "
            "in the fleet file: the router treats them as one"
        )
    return warnings


def _ignored(models: Mapping[str, WorkerModel]) -> Iterator[str]:
    """Yield the policies and flags that the fluid engine ignores."""
    policies = {
        name
        for model in models.values()
        for name, effects in declared_effects(model).items()
        if effects.ignored
    }
    if policies:
        yield " and ".join(sorted(policies))
    for model in models.values():
        if model.longest_chunk:
            yield f"{model.name}'s --long-prefill-token-threshold {model.longest_chunk}"


def _print_result(console: Output, result: BenchResult, run: SimulationRun) -> None:
    text = (
        f"{len(result.outcomes)} requests in {result.duration:.1f} virtual s, simulated in "
        f"{run.wall_s:.1f} s, {show_number(run.speed)} times faster than real time"
    )
    if (share := run.scheduler_share) is not None:
        text += f"; vLLM's schedulers took {share:.0%} of it"
    console.print_text(text)
    for warning in result.warnings:
        console.print_text(warning, "yellow")
    print_errors([outcome.error for outcome in result.outcomes if outcome.error], console)

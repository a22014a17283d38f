"""Simulate and draw the figures and tables of docs/simulated-fleets.md.

    python -m benchmarks.figures --out docs/figures            # all of them
    python -m benchmarks.figures --out /tmp/figures --only fleets --quick

`--engine exact` uses vLLM's schedulers for single workers instead of the fluid engine, which takes
much longer. All values are also printed and written to figures.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from proxy.config import FleetConfig
from proxy.core.router import RouterSettings
from proxy.core.tenants.tenants import TenantSpec
from vllm_sched.bench.plots.chart import Chart, Series, draw_chart
from vllm_sched.bench.plots.curves import Curve, draw_goodput, draw_tail, draw_throughput
from vllm_sched.bench.plots.steps import draw_steps, steps_of
from vllm_sched.bench.results.goodput import Targets, parse
from vllm_sched.bench.results.knee import throughput_knee
from vllm_sched.bench.results.stats import percentile_of_sorted
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.cost import profiles
from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.recursion import Recursion
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.aggregate_flow import AggregateFlow, PlacedWorker
from vllm_sched.sim.fleet.figures import FlowResult
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.planning.fleet_shapes import BOTH, LONG_PROMPT, FleetShape
from vllm_sched.sim.types import Job, WorkerModel

TARGETS = "ttft:3000 tpot:100"
MIXED = "azure-conv:0.95,mooncake-conv:0.05"
LARGE = "h100-70b-tp4"
Policies = Mapping[str, Mapping[str, Any]]
# Scheduling systems on one worker, as policies.
SYSTEMS: Mapping[str, Policies] = {
    "static batching": {"static_batching": {}},
    "prefill first": {"prefill_first": {}},
    "chunks (vLLM)": {},
    "chunks by time": {"chunk_budget": {"itl_ms": 100}},
    "long limit": {"long_prompt": {}},
    "deferred": {"deferred_prefill": {"departures": 8}},
}
# Fleets of six workers with four GPUs each.
FLEETS: Mapping[str, FleetShape | Policies] = {
    "static batching": SYSTEMS["static batching"],
    "prefill first": SYSTEMS["prefill first"],
    "chunks (vLLM)": FleetShape(general=6),
    "long limit": FleetShape(general=6, policy=LONG_PROMPT),
    "deferred": SYSTEMS["deferred"],
    "short/long": FleetShape(short=3, long=3, short_limit=4000, policy=BOTH),
    "prefill/decode": FleetShape(prefill=2, decode=4, policy=LONG_PROMPT),
}
FIGURES = ("lengths", "systems", "policies", "steps", "fleets", "deferred")  # for --only
REFERENCE_RATE = 5000 / 3600
LOADS = (1, 9, 18, 24, 30, 36, 48, 72)  # multiples of REFERENCE_RATE
HUNDRED = 100
STALL_S = 0.3
NOT_DRAWN = ("deferred",)  # holds no request on this machine, so its line is that of vLLM
DURATION_S = 200
SAMPLES = 4000  # quantiles of gaps
TAIL_RATE = 1.5  # requests/s, on one worker
MAX_REQUESTS = 48  # per worker: others wait in the queue, where they may be refused
TENANTS = 50


class Figures:
    """Draws figures and collects their values."""

    def __init__(self, out: Path, *, quick: bool, exact: bool) -> None:
        self.out = out
        self.scale = 0.2 if quick else 1.0
        self.exact = exact
        self.values: dict[str, Any] = {}

    def keep(self, name: str, curves: Mapping[str, Curve]) -> None:
        """Store and print the values of a figure."""
        shown = {
            label: {f"{x:g}": [round(y, 4) for y in ys] for x, ys in curve.points.items()}
            for label, curve in curves.items()
        }
        self.values[name] = shown
        print(name)
        for label, points in shown.items():
            print(f"  {label}: {points}")

    # One worker

    def lengths(self) -> None:
        """Draw throughput against concurrency for prompts of two lengths: 8B on an H100."""
        machine = of_profile("h100-8b")
        curves = {}
        for workload in ("1500x100", "3000x100"):
            curves[f"{workload.partition('x')[0]} tokens in, 100 out"] = self._closed(
                machine, workload, {}, (1, 2, 4, 8, 16, 32, 64, 128, 256)
            )
        draw_throughput(self.out / "throughput-lengths", curves)
        self.keep("throughput-lengths", curves)

    def systems(self) -> None:
        """Draw throughput against concurrency by system: 70B on four H100."""
        machine = of_profile(LARGE)
        names = ("static batching", "prefill first", "chunks (vLLM)", "chunks by time")
        curves = {
            name: self._closed(machine, "azure-conv", SYSTEMS[name], (4, 16, 64, 128, 256))
            for name in names
        }
        draw_throughput(self.out / "throughput-systems", curves)
        self.keep("throughput-systems", curves)

    def _closed(
        self, machine: WorkerModel, workload: str, policies: Policies, loads: Sequence[int]
    ) -> Curve:
        points = {}
        for load in loads:
            schedule = Schedule(
                source=find(workload), concurrency=load, duration_s=120 * self.scale + load / 4
            )
            fleet = self._one(machine, policies)
            played = fleet.play(schedule)
            end = schedule.duration_s or 1.0
            # Measure the second half, without the ramp-up and the drain.
            tokens = 0.0
            for outcome in played.outcomes:
                total, ticks = outcome.prompt_tokens + outcome.completed, outcome.ticks
                if ticks and ticks[0] < ticks[-1]:
                    inside = max(min(ticks[-1], end) - max(ticks[0], end / 2), 0.0)
                    tokens += total * inside / (ticks[-1] - ticks[0])
            points[float(load)] = [tokens / (end / 2)]
        knee = throughput_knee({x: ys[0] for x, ys in points.items()})
        return Curve(points, knee)

    def _one(self, machine: WorkerModel, policies: Policies) -> SimulatedFleet:
        model = replace(machine, name="w", policies=policies, max_num_seqs=256)
        worker = {"name": "w", "profile": machine.profile}
        config = FleetConfig(model="model", workers=[worker])  # type: ignore[arg-type]
        return SimulatedFleet(config, {"w": model}, ExactEngine if self.exact else FluidEngine)

    def policies(self) -> None:
        """Draw goodput against rate by system, and the tail of gaps at one rate: one worker."""
        machine = of_profile(LARGE)
        curves = {}
        gaps: dict[str, list[float]] = {}
        for name, policies in SYSTEMS.items():
            points = {}
            for rate in (0.5, TAIL_RATE, 2.5, 3.5, 4.5, 5.5, 7.0, 9.0):
                seeds = range(1 if self.exact else 3)
                played = [self._system(machine, policies, rate, seed) for seed in seeds]
                points[rate] = [goodput for goodput, _ in played]
                if rate == TAIL_RATE:
                    gaps[name] = played[0][1]
            curves[name] = Curve(points)
        stem = "systems-exact" if self.exact else "systems"
        draw_goodput(self.out / f"goodput-{stem}", curves, _words(TARGETS))
        self.keep(f"goodput-{stem}", curves)
        drawn = {name: values for name, values in gaps.items() if name not in NOT_DRAWN}
        draw_tail(self.out / f"gaps-{stem}", "Gaps between tokens, one worker", "ITL", drawn)
        tails = {
            name: [percentile_of_sorted(sorted(values), share) for share in (50, 99, 99.9, 100)]
            for name, values in gaps.items()
        }
        self.values[f"gaps-{stem}"] = tails
        print(f"gaps-{stem} at {TAIL_RATE:g}/s: p50, p99, p99.9 and longest\n", tails)

    def _system(
        self, machine: WorkerModel, policies: Policies, rate: float, seed: int
    ) -> tuple[float, list[float]]:
        """Return goodput and gaps."""
        if not self.exact:
            placed = [PlacedWorker(replace(machine, name="w", policies=policies, max_num_seqs=256))]
            run = self._open(placed, RouterSettings(), rate, seed)
            return run.goodput, [run.gaps.quantile(at / SAMPLES) for at in range(1, SAMPLES + 1)]
        schedule = self._schedule(rate, seed)
        outcomes = self._one(machine, policies).play(schedule).outcomes
        counted = outcomes[len(outcomes) // 10 :]
        met = sum(map(_targets().is_met_by, counted))
        return rate * met / len(counted), [gap for outcome in counted for gap in outcome.itls]

    def steps(self) -> None:
        """Draw the tokens of each step, with vLLM's scheduler and with chunks by time."""
        machine = of_profile(LARGE)
        schedule = Schedule(source=find(MIXED), rate=TAIL_RATE, duration_s=60 * self.scale, seed=1)
        for name, title in (("chunks (vLLM)", "vLLM"), ("chunks by time", "chunk_budget, 100 ms")):
            model = replace(machine, name="w", policies=SYSTEMS[name], max_num_seqs=256)
            config = FleetConfig(model="model", workers=[{"name": "w", "profile": LARGE}])  # type: ignore[list-item]
            fleet = SimulatedFleet(config, {"w": model}, partial(ExactEngine, traced=True))
            duration = fleet.play(schedule).duration
            (engine,) = fleet.engines.values()
            assert isinstance(engine, ExactEngine)
            steps = steps_of(engine.trace_events(duration))
            stem = "steps-" + name.replace(" (vLLM)", "").replace(" ", "-")
            draw_steps(self.out / stem, f"Tokens per step against the budget: {title}", steps)
            longest = max(step.end - step.start for step in steps)
            self.values[stem] = {"steps": len(steps), "longest_s": round(longest, 3)}
            print(stem, self.values[stem])

    # Fleets

    def fleets(self) -> None:
        """Draw goodput against rate by design, 70B on 24 H100, and print the reference loads."""
        curves: dict[str, Curve] = {}
        for name, design in FLEETS.items():
            points = {}
            for load in LOADS:
                rate = load * REFERENCE_RATE
                points[round(rate, 2)] = [
                    self._design(design, rate, seed).goodput for seed in range(3)
                ]
            curves[name] = Curve(points)
            self.values.setdefault("served", {})[name] = _knee(points)
        draw_goodput(self.out / "goodput-fleets", curves, _words(TARGETS))
        self.keep("goodput-fleets", curves)
        print("served, nine in ten in time, by every seed:", self.values["served"])
        self.values["reference"] = {}
        print("reference: share in time, requests/s in time, TTFT p50 and p99, ITL p99 and max,")
        print("           share of requests without a gap above 300 ms")
        for name, design in FLEETS.items():
            for load in (1, 9, HUNDRED):
                run = self._design(design, load * REFERENCE_RATE, 0)
                self._keep_reference(f"{name} x{load}", run)

    def _keep_reference(self, name: str, run: FlowResult) -> None:
        figures, gaps = run.all, run.gaps
        reference = (
            figures.share, run.goodput, figures.ttft.quantile(0.5), figures.ttft.quantile(0.99),
            gaps.quantile(0.99), gaps.most, figures.longest.share_at_most(STALL_S),
        )  # fmt: skip
        self.values["reference"][name] = [round(value, 4) for value in reference]
        print(f"  {name:<22}", " ".join(f"{value:9.3f}" for value in reference))

    def _design(self, design: FleetShape | Policies, rate: float, seed: int) -> FlowResult:
        machine = of_profile(LARGE)
        # Refuse requests that would be late.
        settings = RouterSettings(queue_wait_s=2.0)
        if isinstance(design, FleetShape):
            placed = design.place_workers(machine)
            settings = replace(design.settings(), queue_wait_s=2.0)
        else:
            models = [replace(machine, name=f"w{i}", policies=design) for i in range(6)]
            placed = [PlacedWorker(model) for model in models]
        placed = [replace(worker, max_requests=MAX_REQUESTS) for worker in placed]
        return self._open(placed, settings, rate, seed)

    def _open(
        self, placed: Sequence[PlacedWorker], settings: RouterSettings, rate: float, seed: int
    ) -> FlowResult:
        schedule = self._schedule(rate, seed)
        tenants = [TenantSpec(f"tenant-{number + 1}") for number in range(TENANTS)]
        flow = AggregateFlow(placed, settings, _targets(), tenants=tenants)
        return flow.play(schedule, warm=(schedule.count or 0) // 10)

    def _schedule(self, rate: float, seed: int) -> Schedule:
        count = round(min(max(rate * DURATION_S, 600), 20_000) * self.scale)
        return Schedule(
            source=find(MIXED), rate=rate, count=count, duration_s=2 * count / rate, seed=seed,
            tenants=TENANTS,
        )  # fmt: skip

    # Deferred prefill

    def deferred(self) -> None:
        """Draw throughput against K, 8B on an A100 as in the paper: recursion and fluid engine."""
        time = profiles.find("a100-8b").time
        backlog = BacklogModel.from_step_time(
            time, slots=256, mean_output=200, mean_prompt=220, decodes_pause=True
        )
        exact = Recursion(backlog)
        drawn = [1, 2, 4, 8, 13, 20, 26, 40, 64, 96]
        line = [(k, exact.solve_for(k).throughput) for k in drawn]
        dots = [(k, self._backlog(k)) for k in (1, 8, 13, 26, 64)]
        self.values["deferred"] = {"recursion": line, "fluid engine": dots}
        print("deferred", json.dumps(self.values["deferred"]))
        picture = Chart(
            title="Throughput against K: 8B on an A100, 256 slots, prompts of 220, answers of 200",
            subtitle="decodes pause for prefills; a backlog that never ends",
            x="departures waited for (K)",
            y="requests/s",
            series=[
                Series("recursion", line),
                Series("fluid engine", dots, dots=True),
            ],
            log_x=True,
            from_zero=False,
        )
        draw_chart(picture, self.out / "deferred.svg")

    def _backlog(self, threshold: int) -> float:
        rng, count = random.Random(0), round(12_000 * max(self.scale, 0.5))
        deferred = {"departures": threshold, "max_delay_ms": 1e6}
        model = WorkerModel(
            name="w", time=profiles.find("a100-8b").time, max_model_len=8192, kv_tokens=10**7,
            max_num_seqs=256, max_num_batched_tokens=10**6,
            policies={"prefill_first": {}, "deferred_prefill": deferred},
        )  # fmt: skip
        engine = FluidEngine(model)
        for number in range(count):
            output = 1 + math.ceil(math.log(1 - rng.random()) / math.log1p(-1 / 200))
            engine.submit(Job(str(number), 220, output), 0.0)
        ends: list[float] = []
        while (at := engine.next_at()) < math.inf:
            ends += [event.at for event in engine.advance(at) if event.finished]
        first, last = count // 5, count * 4 // 5
        return (last - first) / (ends[last] - ends[first])


def _targets() -> Targets:
    return parse(TARGETS.split())


def _words(targets: str) -> str:
    pairs = (target.split(":") for target in targets.split())
    return ", ".join(f"{name.upper()} {value} ms" for name, value in pairs)


def _knee(points: Mapping[float, Sequence[float]]) -> float | None:
    served = None
    for rate in sorted(points):
        if min(points[rate]) < 0.9 * rate * 0.98:
            break
        served = rate
    return served


def _named(figures: Figures) -> Iterator[tuple[str, Callable[[], None]]]:
    for name in FIGURES:
        yield name, getattr(figures, name)


def main() -> None:
    parser = argparse.ArgumentParser(description="draw the figures of docs/simulated-fleets.md")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], choices=FIGURES)
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    parser.add_argument("--engine", choices=("fluid", "exact"), default="fluid")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    figures = Figures(args.out, quick=args.quick, exact=args.engine == "exact")
    for name, draw in _named(figures):
        if not args.only or name in args.only:
            draw()
    # The documentation uses only the SVG files.
    for path in args.out.glob("*.svg"):
        path.with_suffix(".png").unlink(missing_ok=True)
    store = args.out / "figures.json"
    stored = json.loads(store.read_text()) if store.exists() else {}
    store.write_text(json.dumps(stored | figures.values, indent=1) + "\n")


if __name__ == "__main__":
    main()

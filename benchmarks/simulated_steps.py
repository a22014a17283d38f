"""Compare computed and modelled step times in the simulator.

    python -m benchmarks.simulated_steps --save out/steps.json

`benchmarks.simulator` compares whole fleets on an idle machine. Here a real engine in this process
computes each step of a simulated scheduler, and the step takes that processor time. The cost model
is fitted to one such run; runs of another seed are simulated with computed and with modelled steps.
Router, schedulers, policies and workload are the same, so only step times and their effects differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip

from rich.console import Console
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.simulator import BUDGET, COSTS, FIGURES, Pair, cases, print_comparison
from proxy.config import parse
from vllm_sched.bench.results import goodput
from vllm_sched.bench.results.result import BenchResult
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.cost.calibration import Calibration, calibrate
from vllm_sched.cost.step_time import StepTime, TimedStep
from vllm_sched.engine.simulated import SimulatedStep
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.models import worker_models
from vllm_sched.sim.types import MakeEngine, WorkerModel
from vllm_sched.workers.tiny_model import tiny_model

BLOCK, BLOCKS, LONGEST = 32, 2048, 16_384
FIT, COMPARED = 1, 0  # seeds


def real_engine() -> LLMEngine:
    """Return an engine, of which only the model is used."""
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(tiny_model()),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=LONGEST,
            max_num_batched_tokens=BUDGET,
            num_gpu_blocks_override=BLOCKS,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
    )


class ComputedEngine(ExactEngine):
    """An engine whose steps take the processor time of computing them."""

    def __init__(self, model: WorkerModel, *, executor: Any, seen: list[TimedStep]) -> None:
        super().__init__(model)
        self._executor = executor
        self._seen = seen

    def step_s(self, step: SimulatedStep) -> float:
        """Compute a step and return its processor time."""
        started = time.process_time()
        if self._executor.execute_model(step.output) is None:
            self._executor.sample_tokens(None)
        seconds = time.process_time() - started
        self._seen.append(TimedStep(step.shape, seconds))
        return seconds


def play(
    blocks: Mapping[str, Any], schedule: Schedule, make: MakeEngine, folder: Path
) -> dict[str, Any]:
    """Simulate a fleet and return the JSON that `bench` saves."""
    config = parse(json.dumps({"model": "tiny", **blocks}), "fleet")
    models = worker_models(config, folder / "fleet.yaml")
    played = SimulatedFleet(config, models, make).play(schedule)
    result = BenchResult(
        schedule, goodput.Targets(), played.outcomes, played.duration, "simulated", "tiny"
    )
    return {**result.to_json(), "client_busy": 0.0}


def median_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure, because other load changes the processor's speed."""

    def of(sides: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            **sides[0],
            **{key: statistics.median(side[key] for side in sides) for key in FIGURES.values()},
        }

    names = rounds[0]["classes"]
    classes = {name: of([played["classes"][name] for played in rounds]) for name in names}
    return {**of(rounds), "classes": classes}


def fit(
    executor: Any, fleets: Sequence[Mapping[str, Any]], schedule: Schedule, folder: Path
) -> Calibration:
    """Fit the cost model to the computed steps of all fleets."""
    seen: list[TimedStep] = []
    for blocks in fleets:
        play(blocks, schedule, partial(ComputedEngine, executor=executor, seen=seen), folder)
    return calibrate(seen)


def write_costs(folder: Path, time_of: StepTime) -> None:
    """Write the profiles that the fleets' workers name."""
    for name in COSTS.values():
        (folder / name).write_text(json.dumps({"step_time": time_of.to_json()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="100x24:0.85,6000x16:0.15")
    parser.add_argument("--request-rate", type=float, default=2.0)
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of computed steps")
    parser.add_argument("--cases", nargs="+", choices=cases([0, 1]), default=[*cases([0, 1])])
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    console = Console()
    engine = real_engine()  # a reference keeps the model alive
    executor = engine.engine_core.engine_core.model_executor

    def schedule(seed: int) -> Schedule:
        return Schedule(
            source=find(args.workload), rate=args.request_rate, duration_s=args.duration,
            seed=seed,
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_costs(folder, StepTime())
        fleets = {key: blocks for key, blocks in cases([0, 1]).items() if key in args.cases}
        fitted = fit(executor, [*fleets.values()][:2], schedule(FIT), folder)
        console.print(
            f"fitted to {len(fitted.fitted)} steps; median error of {len(fitted.held_out)} others "
            f"{fitted.error() or 0.0:.1%}: {fitted.time}",
            highlight=False,
        )
        write_costs(folder, fitted.time)
        pairs = []
        for key, blocks in fleets.items():
            computed = partial(ComputedEngine, executor=executor, seen=[])
            rounds = [
                play(blocks, schedule(COMPARED), computed, folder) for _ in range(args.rounds)
            ]
            simulated = play(blocks, schedule(COMPARED), ExactEngine, folder)
            pairs.append(Pair(key, median_of(rounds), simulated))
            console.print(f"{key}: {simulated['completed']} requests", style="dim")
    print_comparison(pairs, console)
    if args.save:
        content = {"step_time": fitted.time.to_json(), "error": fitted.error()}
        content["cases"] = {p.name: {"real": p.real, "simulated": p.simulated} for p in pairs}
        args.save.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

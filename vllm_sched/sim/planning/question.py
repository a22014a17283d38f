"""What a fleet is planned for: traffic, machine, targets and the effort of the search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.knee import SERVED_SHARE
from vllm_sched.bench.traffic.sampled import without_end
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request, TrafficSource
from vllm_sched.sim.planning.fleet_shapes import FAMILIES, POLICIES
from vllm_sched.sim.types import WorkerModel

DRAWS, FEW_DRAWS = 6, 3
QUICK_EFFORT: Final = 1 / 3  # with few draws
# Distance between the seeds of draws, far from the seeds that users replay a plan with.
SEEDS_APART: Final = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    source: TrafficSource
    machine: WorkerModel
    prefill_machine: WorkerModel | None = None  # of prefill workers, if it differs
    targets: Targets
    burstiness: float | None = None
    scale: float = 1.0
    prefix_hit: float | None = None
    seed: int = 0
    policies: tuple[str, ...] = POLICIES
    families: tuple[str, ...] = FAMILIES
    share: float = SERVED_SHARE
    effort: float = 1.0  # factor on the requests of each run
    draws: int = DRAWS

    def __post_init__(self) -> None:
        # Sample a trace from the whole file, without end.
        source = without_end(self.source, random.Random(self.seed))
        object.__setattr__(self, "source", source)

    @property
    def prompt_machine(self) -> WorkerModel:
        """The machine that computes long prompts."""
        return self.prefill_machine or self.machine

    @property
    def machines(self) -> tuple[WorkerModel, WorkerModel | None]:
        return self.machine, self.prefill_machine

    @property
    def profiles(self) -> str:
        if self.prefill_machine is None:
            return self.machine.profile
        return f"{self.prefill_machine.profile} for prefill, {self.machine.profile} for decode"

    def schedule(self, rate: float, count: int, draw: int = 0) -> Schedule:
        """Return requests at a rate; draw 0 is for the rough search."""
        return Schedule(
            source=self.source,
            rate=rate,
            burstiness=self.burstiness,
            count=count,
            duration_s=2 * count / rate + 1,
            seed=self.seed + draw * SEEDS_APART,
            scale=self.scale,
            prefix_hit=self.prefix_hit,
        )

    def shapes(self, draw: int = 0) -> Iterator[Request]:
        return replace(self.schedule(1.0, 1, draw), count=None).shapes()

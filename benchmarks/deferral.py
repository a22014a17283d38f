"""Compare `deferred_prefill` with K=1: with known costs, and in a real engine.

    python -m benchmarks.deferral
    python -m benchmarks.deferral --real --rounds 6

The first plays a closed loop in virtual time, in which the policy learns the costs from noisy
steps. The second runs one engine of the tiny model that is always full. The policy is switched off
and on while the engine runs, in alternating phases. Off, no request is held: K is 1. Times are
those of the processor, also for the policy. On a busy machine they vary by 10 %; requests per step
and the policy's own time do not.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from tests.engine.environment import IN_PROCESS
from tests.policies.closed_loop import ClosedLoop
from vllm_sched.cost.step_time import StepTime
from vllm_sched.policies import registry
from vllm_sched.policies.deferred_prefill import DeferredPrefill
from vllm_sched.policies.types import EngineFacts, LaneCount, Step, StepResult

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.llm_engine import LLMEngine

# The paper's machine and load.
SLOTS, OUTPUT, PROMPT, BUDGET = 256, 200, 220, 8192
PAPER: Final = StepTime(
    decode_fixed_s=0.010, decode_s=6e-5, prefill_fixed_s=0.011, prefill_s=9.5e-5
)
NOISE: Final = 0.05
EXTRA_MS: Final = (0.0, 2.5, 6.0)  # of a mixed step
# The real engine's load.
PROMPTS, OUTPUTS, WAITING = (20, 60), (8, 40), 24
WARM_UP, PHASES, PHASE_STEPS, SETTLING = 400, 24, 20, 5


def rates(extra_s: float, *, decodes_pause: bool, requests: int) -> dict[object, float]:
    """Return the requests per second of the closed loop, by K."""
    by_departures: dict[object, float] = {}
    for departures in (1, "auto"):
        others: dict[str, Mapping[str, Any]] = {"prefill_first": {}} if decodes_pause else {}
        policies = registry.build(
            {**others, "deferred_prefill": {"departures": departures}},
            EngineFacts(32_768, BUDGET, SLOTS),
        )
        step_time = replace(PAPER, mixed_s=extra_s)
        loop = ClosedLoop(policies, step_time, SLOTS, OUTPUT, PROMPT, noise=NOISE)
        by_departures[departures] = loop.measured(requests, requests)
    return by_departures


class SwitchedDeferral(DeferredPrefill):
    """The policy with a switch. While off, it holds and learns nothing."""

    on = True
    spent_s = 0.0  # processor time of the policy

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        began = time.thread_time()
        super().begin_step(step, lanes)
        self.spent_s += time.thread_time() - began
        if not self.on:
            self._hold = None

    def observe(self, result: StepResult) -> None:
        began = time.thread_time()
        if self.on:
            super().observe(result)
        self.spent_s += time.thread_time() - began


@contextmanager
def switched() -> Iterator[None]:
    """Have the switched policy in the registry for a while."""
    name = DeferredPrefill.name
    before, registry.POLICIES[name] = registry.POLICIES[name], SwitchedDeferral
    try:
        yield
    finally:
        registry.POLICIES[name] = before


@dataclass
class ProcessorClock:
    """A scheduler's clock, and the requests' worth of computed tokens since the last reset."""

    work: float = 0.0

    @property
    def now(self) -> float:
        return time.process_time()

    def begin(self, output: SchedulerOutput) -> None:
        """Count prompts and responses alike, since the mix differs from phase to phase."""
        for tokens in output.num_scheduled_tokens.values():
            self.work += tokens / sum(PROMPTS if tokens > 1 else OUTPUTS)

    def end(self, output: SchedulerOutput) -> None: ...


class Phase(NamedTuple):
    """A phase's requests, by their computed tokens, and its processor time."""

    requests: float
    seconds: float
    policy_s: float


class FullEngine:
    """A real engine in which requests always wait."""

    def __init__(self, engine: LLMEngine, seed: int) -> None:
        from tests.engine.one_engine import exchange_scheduler

        self.engine = engine
        self.clock = ProcessorClock()
        self.rng = random.Random(seed)
        self.added = 0
        with switched():
            self.scheduler = exchange_scheduler(engine, {"deferred_prefill": {}}, self.clock)
        (self.policy,) = self.scheduler._policies

    def steps(self, count: int) -> None:
        from tests.engine.one_engine import add, prompt_of

        for _ in range(count):
            while len(self.scheduler.waiting) < WAITING:
                prompt = prompt_of(self.rng.randint(*PROMPTS), self.rng)
                output = self.rng.randint(*OUTPUTS)
                add(self.engine, str(self.added), prompt, output, None, self.clock.now)
                self.added += 1
            self.engine.step()

    def phase(self, *, on: bool) -> Phase:
        """Run a phase with the policy on or off."""
        self.policy.on = on
        self.steps(SETTLING)
        self.clock.work, self.policy.spent_s, began = 0.0, 0.0, self.clock.now
        self.steps(PHASE_STEPS)
        return Phase(self.clock.work, self.clock.now - began, self.policy.spent_s)


def compare_real(console: Console, rounds: int, seed: int) -> None:
    """Print the ratio of each round, and their median."""
    from tests.engine.one_engine import make_engine

    full = FullEngine(make_engine(max_num_seqs=16), seed)
    full.steps(WARM_UP)
    phases: dict[bool, list[Phase]] = {False: [], True: []}
    for number in range(rounds):
        for phase in range(PHASES):
            # As often one first as the other, since the machine's speed drifts.
            on = phase % 4 in {1, 2}
            phases[on].append(full.phase(on=on))
        auto, one = (phases[on][-PHASES // 2 :] for on in (True, False))
        console.print(f"round {number + 1}: {_ratios(auto, one)}", highlight=False)
    shown, counted = full.policy.gauges(), full.policy.counters()
    console.print(f"all: {_ratios(phases[True], phases[False])}", highlight=False)
    console.print(
        f"K={shown['k']:.0f}, held for {counted['held_seconds']:.1f} s in all", highlight=False
    )


def _ratios(auto: Sequence[Phase], one: Sequence[Phase]) -> str:
    per_second = [median(phase.requests / phase.seconds for phase in side) for side in (auto, one)]
    per_step = [sum(phase.requests for phase in side) for side in (auto, one)]
    spent = [sum(phase.policy_s for phase in side) for side in (auto, one)]
    share = (spent[0] - spent[1]) / sum(phase.seconds for phase in auto)
    return (
        f"auto to K=1: requests per step {per_step[0] / per_step[1]:.3f}x, per second of processor "
        f"time {per_second[0] / per_second[1]:.3f}x, {share:.2%} of it for the policy"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="deferral", description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="in a real engine of the tiny model")
    parser.add_argument("--rounds", type=int, default=6, help="of 24 phases in the real engine")
    parser.add_argument("--requests", type=int, default=6000, help="of the closed loop")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console()
    if args.real:
        compare_real(console, args.rounds, args.seed)
        return
    table = Table("a mixed step costs extra", "K=1", "auto", "auto to K=1")
    for extra_ms in (*EXTRA_MS, None):
        by_departures = rates(
            (extra_ms or 0) / 1000, decodes_pause=extra_ms is None, requests=args.requests
        )
        one, auto = by_departures[1], by_departures["auto"]
        name = "decodes pause" if extra_ms is None else f"{extra_ms} ms"
        table.add_row(name, f"{one:.2f}/s", f"{auto:.2f}/s", f"{auto / one:.3f}x")
    console.print(table)


if __name__ == "__main__":
    # Set before torch is imported.
    os.environ |= IN_PROCESS
    main()

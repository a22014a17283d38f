"""Play one workload against two schedulers, on this machine, in turns.

Both workers are alive all the time and one of them works at a time: A B, B A, A B. What the
machine does to one side of a round (a neighbour, a clock that throttles) it does to the other; what
one side does to the machine is over before the other begins.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from vllm_sched.bench.compare import report
from vllm_sched.bench.compare.runner import Round, play
from vllm_sched.bench.compare.workloads import CLASSES, SHORT
from vllm_sched.bench.results import engine_trace
from vllm_sched.files import write_whole
from vllm_sched.workers.launch import Side, Worker, on_cpu, trace_flags, tracing, worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from rich.console import Console
    from rich.status import Status

    from vllm_sched.bench.compare.runner import RequestTimes
    from vllm_sched.bench.compare.workloads import Workload
    from vllm_sched.bench.results.engine_trace import Stories

LONE_SAMPLES = 20
# Processes of vLLM wait for a step by spinning, until a second after the last: where cores are few
# the side that played before would play against the next one.
REST_S = 1.5
# A client held up for longer than this has seen pauses that no worker made.
STALL_LIMIT_S = 0.1


@dataclass(frozen=True)
class ComparisonPlan:
    """What both sides of a comparison share."""

    model: str
    workload: Workload
    rounds: int = 3
    lone_samples: int = LONE_SAMPLES


@dataclass
class Contender:
    """One side: what it is called, the server it is, and what has been measured on it."""

    role: str
    label: str
    worker: Worker
    facts: Mapping[str, object] = field(default_factory=dict)  # about it, for the JSON
    rounds: list[Round] = field(default_factory=list)
    trace: Path | None = None  # where its engine writes what it did
    stories: Stories = field(default_factory=dict)  # what is read there

    @property
    def failed(self) -> list[RequestTimes]:
        """Its failed requests, over all rounds."""
        return [record for played in self.rounds for record in played.failed]


class ProgressReporter:
    """Says what is going on: a live line on a terminal, an occasional line elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._step = ""

    def step(self, text: str) -> None:
        """Begin something."""
        self._step = text
        if self._status:
            self._status.update(text)
        else:
            self._console.print(text, style="dim", highlight=False)

    def detail(self, text: str) -> None:
        """Progress within a step: for those who watch."""
        if self._status:
            self._status.update(f"{self._step}: {text}")

    def __enter__(self) -> Self:
        """Show the live line, where there is a terminal to show it on."""
        if self._console.is_terminal:
            # Few refreshes: the clock that times tokens runs in this process too.
            self._status = self._console.status("", refresh_per_second=2)
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove it."""
        if self._status:
            self._status.stop()
            self._status = None


def contender(
    role: str, side: Side, plan: ComparisonPlan, *, sharing: int = 2, trace: Path | None = None
) -> Contender:
    """Describe a worker for a side, one of `sharing` alive at once on this machine."""
    if trace is not None:
        side, trace = engine_trace.traceable(side), engine_trace.path_of(trace, role)
    # Each takes nearly the whole accelerator unless told otherwise.
    share = [] if on_cpu() else ["--gpu-memory-utilization", f"{0.85 / sharing:.2f}"]
    flags = [*share, *plan.workload.worker_flags]
    facts = {"scheduler": side.name, "policies": side.settings}
    env = None
    if trace is not None:
        flags += trace_flags(side.extra)
        env = tracing(trace)
    started = worker(side, model=plan.model, flags=flags, name=role, env=env)
    return Contender(role, side.label, started, facts, trace=trace)


@asynccontextmanager
async def running(workers: Sequence[Worker], narrator: ProgressReporter) -> AsyncIterator[None]:
    """Have all workers up inside the block and none after it, however it ends."""
    try:
        narrator.step(f"starting {' and '.join(w.name for w in workers)} (about a minute)")
        if on_cpu():
            for each in workers:
                each.start()
            await asyncio.gather(*(asyncio.to_thread(each.wait_ready) for each in workers))
        else:
            # vLLM measures free memory while it starts: a second one would spoil the figure.
            for each in workers:
                each.start()
                await asyncio.to_thread(each.wait_ready)
        yield
    finally:
        narrator.step("stopping the workers")
        await asyncio.gather(*(asyncio.to_thread(each.stop) for each in workers))


async def measure(
    contenders: Sequence[Contender], plan: ComparisonPlan, narrator: ProgressReporter
) -> None:
    """Play the rounds against running workers, the order turned round every time."""
    for each in contenders:
        narrator.step(f"warming up {each.role}")
        # With all of it: what a policy learns from a small part is not what it knows after an hour.
        await play_round(each, plan, plan.workload, 0, narrator)
    for number in range(1, plan.rounds + 1):
        for each in contenders if number % 2 else reversed(contenders):
            narrator.step(f"round {number} of {plan.rounds}, {each.role} ({each.label})")
            each.rounds.append(await play_round(each, plan, plan.workload, number, narrator))


async def compare(
    baseline: Side,
    candidate: Side,
    plan: ComparisonPlan,
    narrator: ProgressReporter,
    *,
    trace: Path | None = None,
) -> Comparison:
    """Start both sides, measure them, and stop them; with a file each for what the engines did."""
    sides = (
        contender("baseline", baseline, plan, trace=trace),
        contender("candidate", candidate, plan, trace=trace),
    )
    async with running([each.worker for each in sides], narrator):
        await measure(sides, plan, narrator)
        for each in sides:
            if each.trace is not None:
                narrator.step(f"reading what {each.role} did")
                each.stories = await asyncio.to_thread(engine_trace.fetch, each.worker, each.trace)
    return Comparison(plan, *sides)


@dataclass(frozen=True)
class Comparison:
    """A finished comparison."""

    plan: ComparisonPlan
    baseline: Contender
    candidate: Contender

    @property
    def sides(self) -> tuple[Contender, Contender]:
        """Baseline, candidate."""
        return self.baseline, self.candidate

    @property
    def figures(self) -> list[report.Figure]:
        """What is compared."""
        return report.figures(self.baseline.rounds, self.candidate.rounds)

    @property
    def failed(self) -> bool:
        """Whether any request failed."""
        return any(each.failed for each in self.sides)

    @property
    def disturbed(self) -> list[int]:
        """Indices of the rounds in which the client itself got no processor for a while."""
        return [
            index
            for index in range(self.plan.rounds)
            if any(each.rounds[index].stall > STALL_LIMIT_S for each in self.sides)
        ]

    def warning(self) -> str:
        """Say that the machine was too busy to measure on; empty when it was not."""
        if not self.disturbed:
            return ""
        worst = max(played.stall for each in self.sides for played in each.rounds)
        return (
            f"{len(self.disturbed)} of {self.plan.rounds} rounds were disturbed: other work on "
            f"this machine held the client up for as long as {worst:.2f} s; measure again "
            "when it is quiet"
        )

    def typical(self) -> int:
        """Index of the round to draw: of those undisturbed, the median by the shorts' gain."""

        def gain(index: int) -> float:
            ours, theirs = (
                report.percentile(report.ttfts([each.rounds[index]], SHORT), 50) or 0.0
                for each in (self.candidate, self.baseline)
            )
            return ours / theirs if theirs else 0.0

        everything = range(self.plan.rounds)
        by_gain = sorted(set(everything) - set(self.disturbed) or everything, key=gain)
        return by_gain[len(by_gain) // 2]

    def to_json(self) -> dict[str, Any]:
        """Give settings, samples and ratios; `vllm bench serve` names the keys where it can."""
        workload = self.plan.workload
        return {
            "settings": {
                "model": self.plan.model,
                "workload": asdict(workload),
                "rounds": self.plan.rounds,
                "lone_samples": self.plan.lone_samples,
            },
            "warning": self.warning(),
            "sides": {each.role: _side_json(each) for each in self.sides},
            "figures": [asdict(figure) for figure in self.figures],
        }

    def save(self, path: Path) -> None:
        """Write the JSON."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")


def _side_json(each: Contender) -> dict[str, Any]:
    return {
        **each.facts,
        "command": each.worker.command,
        **report.serve_summary(each.rounds),
        "classes": {k: report.serve_summary(each.rounds, k) for k in (*CLASSES, "lone")},
        "per_round": [
            {
                "number": played.number,
                "tokens_per_s": report.total_rate(played),
                "foreground_s": report.foreground_end(played),
                "client_stall_s": played.stall,
            }
            for played in each.rounds
        ],
    }


async def play_round(
    each: Contender,
    plan: ComparisonPlan,
    workload: Workload,
    number: int,
    narrator: ProgressReporter,
) -> Round:
    """Play a round against one of them; round 0 warms up."""
    await asyncio.sleep(REST_S)
    each.worker.check()  # a dead worker is one clear error, not one for every request
    done = 0

    def count(_: RequestTimes) -> None:
        nonlocal done
        done += 1
        narrator.detail(f"{done} requests done")

    return await play(
        each.worker.url,
        plan.model,
        workload,
        number,
        lone_samples=plan.lone_samples if number else 1,
        on_done=count,
    )

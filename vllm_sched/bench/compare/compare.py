"""Play one workload against two schedulers on this machine, in turns (A B, B A, A B).

Both workers stay up, and one plays at a time. So a disturbance of the machine affects both sides of
a round, and the sides do not disturb each other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.status import Status
from rich.table import Table

from vllm_sched.bench.compare import report
from vllm_sched.bench.compare.runner import Round, play
from vllm_sched.bench.compare.workloads import CLASSES, SHORT, TURN, Workload
from vllm_sched.bench.results import engine_trace
from vllm_sched.bench.results.engine_trace import Stories
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile
from vllm_sched.files import write_whole
from vllm_sched.workers.launch import Side, Worker, on_cpu, trace_flags, trace_variables, worker

LONE_SAMPLES = 20
# vLLM's processes spin for a second after the last step, which would slow down the other side.
PAUSE_BETWEEN_SIDES_S = 1.5
# A client without CPU for longer than this reports pauses that no worker made.
STALL_LIMIT_S = 0.1


@dataclass(frozen=True)
class ComparisonPlan:
    model: str
    workload: Workload
    rounds: int = 3
    lone_samples: int = LONE_SAMPLES


@dataclass
class Contender:
    role: str
    label: str
    worker: Worker
    facts: Mapping[str, object] = field(default_factory=dict)  # for the JSON
    rounds: list[Round] = field(default_factory=list)
    trace: Path | None = None  # the engine's trace file
    stories: Stories = field(default_factory=dict)  # content of the trace

    @property
    def failed(self) -> list[Outcome]:
        return [record for played in self.rounds for record in played.failed]


class ProgressReporter:
    """Reports progress: a live line on a terminal, otherwise a line per step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._step = ""

    def step(self, text: str) -> None:
        self._step = text
        if self._status:
            self._status.update(text)
        else:
            self._console.print(text, style="dim", highlight=False)

    def detail(self, text: str) -> None:
        """Report progress within a step, on a terminal only."""
        if self._status:
            self._status.update(f"{self._step}: {text}")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Refreshed rarely, because this process also times the tokens.
            self._status = self._console.status("", refresh_per_second=2)
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()
            self._status = None


def contender(
    role: str, side: Side, plan: ComparisonPlan, *, sharing: int = 2, trace: Path | None = None
) -> Contender:
    """Return a side with its worker, one of `sharing` workers that run at the same time."""
    # By default a worker takes nearly the whole accelerator.
    share = [] if on_cpu() else ["--gpu-memory-utilization", f"{0.85 / sharing:.2f}"]
    flags, env = [*share, *plan.workload.worker_flags], None
    if trace is not None:
        side, trace = engine_trace.with_tracing(side), engine_trace.path_of(trace, role)
        flags += trace_flags(side.extra)
        env = trace_variables(trace)
    facts = {"scheduler": side.name, "policies": side.settings}
    started = worker(side, model=plan.model, flags=flags, name=role, env=env)
    return Contender(role, side.label, started, facts, trace=trace)


@asynccontextmanager
async def running(workers: Sequence[Worker], reporter: ProgressReporter) -> AsyncIterator[None]:
    """Run all workers inside the block, and stop all of them at its end."""
    try:
        reporter.step(f"starting {' and '.join(w.name for w in workers)} (about a minute)")
        if on_cpu():
            for worker in workers:
                worker.start()
            await asyncio.gather(*(asyncio.to_thread(worker.wait_ready) for worker in workers))
        else:
            # vLLM measures free memory at its start, so one worker starts at a time.
            for worker in workers:
                worker.start()
                await asyncio.to_thread(worker.wait_ready)
        yield
    finally:
        reporter.step("stopping the workers")
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))


async def measure(
    contenders: Sequence[Contender], plan: ComparisonPlan, reporter: ProgressReporter
) -> None:
    """Play the rounds against running workers, in reversed order every second round."""
    for contender in contenders:
        reporter.step(f"warming up {contender.role}")
        # The whole workload, so that policies learn what they would know in production.
        await play_round(contender, plan, plan.workload, 0, reporter)
    for number in range(1, plan.rounds + 1):
        for contender in contenders if number % 2 else reversed(contenders):
            reporter.step(f"round {number} of {plan.rounds}, {contender.role} ({contender.label})")
            contender.rounds.append(
                await play_round(contender, plan, plan.workload, number, reporter)
            )


async def compare(
    baseline: Side,
    candidate: Side,
    plan: ComparisonPlan,
    reporter: ProgressReporter,
    *,
    trace: Path | None = None,
) -> Comparison:
    """Start, measure and stop both sides; `trace` gives a trace file per engine."""
    sides = (
        contender("baseline", baseline, plan, trace=trace),
        contender("candidate", candidate, plan, trace=trace),
    )
    async with running([side.worker for side in sides], reporter):
        await measure(sides, plan, reporter)
        for side in sides:
            if side.trace is not None:
                reporter.step(f"reading the trace of {side.role}")
                side.stories = await asyncio.to_thread(engine_trace.fetch, side.worker, side.trace)
    return Comparison(plan, sides)


@dataclass(frozen=True)
class Comparison:
    """Contenders under the same load; the others are compared with the first."""

    plan: ComparisonPlan
    contenders: Sequence[Contender]

    @property
    def figures(self) -> dict[str, list[report.Figure]]:
        first, *others = self.contenders
        return {other.role: report.figures(first.rounds, other.rounds) for other in others}

    @property
    def drawn(self) -> tuple[Contender, Contender]:
        """The first and the last contender, which uses all pools of a fleet."""
        return self.contenders[0], self.contenders[-1]

    @property
    def failed(self) -> bool:
        return any(contender.failed for contender in self.contenders)

    @property
    def disturbed(self) -> list[int]:
        """Indices of the rounds in which the client had no CPU for a while."""
        return [
            index
            for index in range(self.plan.rounds)
            if any(contender.rounds[index].stall > STALL_LIMIT_S for contender in self.contenders)
        ]

    def warning(self) -> str:
        """Return a warning if the machine was too busy to measure; otherwise an empty text."""
        if not self.disturbed:
            return ""
        worst = max(played.stall for contender in self.contenders for played in contender.rounds)
        return (
            f"{len(self.disturbed)} of {self.plan.rounds} rounds were disturbed: because of other "
            f"work on this machine the client had no CPU for up to {worst:.2f} s; measure again "
            "when the machine is idle"
        )

    def typical(self) -> int:
        """Return the round to draw: undisturbed, with the median gain of shorts or turns."""

        def median_ttft(played: Round) -> float:
            samples = report.ttfts([played], SHORT) or report.ttfts([played], TURN)
            return percentile(samples, 50) or 0.0

        def gain(index: int) -> float:
            theirs, ours = (median_ttft(contender.rounds[index]) for contender in self.drawn)
            return ours / theirs if theirs else 0.0

        everything = range(self.plan.rounds)
        undisturbed = [index for index in everything if index not in self.disturbed]
        by_gain = sorted(undisturbed or everything, key=gain)
        return by_gain[len(by_gain) // 2]

    def table(self) -> Table:
        labels = [contender.label for contender in self.contenders]
        failed = [len(contender.failed) for contender in self.contenders]
        return report.table(labels, [*self.figures.values()], failed)

    def to_json(self) -> dict[str, Any]:
        figures = {
            role: [asdict(figure) for figure in lines] for role, lines in self.figures.items()
        }
        return {
            "settings": {
                "model": self.plan.model,
                "workload": asdict(self.plan.workload),
                "rounds": self.plan.rounds,
                "lone_samples": self.plan.lone_samples,
            },
            "warning": self.warning(),
            "sides": {contender.role: _side_json(contender) for contender in self.contenders},
            "figures": figures if len(figures) > 1 else next(iter(figures.values())),
        }

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")


def _side_json(contender: Contender) -> dict[str, Any]:
    return {
        **contender.facts,
        "command": contender.worker.command,
        **report.serve_summary(contender.rounds),
        "classes": {k: report.serve_summary(contender.rounds, k) for k in (*CLASSES, "lone")},
        "per_round": [
            {
                "number": played.number,
                "tokens_per_s": report.total_rate(played),
                "foreground_s": report.foreground_end(played),
                "client_stall_s": played.stall,
            }
            for played in contender.rounds
        ],
    }


async def play_round(
    contender: Contender,
    plan: ComparisonPlan,
    workload: Workload,
    number: int,
    reporter: ProgressReporter,
) -> Round:
    """Play a round against one side; round 0 is a warm-up."""
    await asyncio.sleep(PAUSE_BETWEEN_SIDES_S)
    contender.worker.check()  # one clear error for a dead worker, instead of one per request
    done = 0

    def count(_: Outcome) -> None:
        nonlocal done
        done += 1
        reporter.detail(f"{done} requests done")

    return await play(
        contender.worker.url,
        plan.model,
        workload,
        number,
        lone_samples=plan.lone_samples if number else 1,
        on_done=count,
    )

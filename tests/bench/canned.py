"""Results of rounds without a worker."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType

from vllm_sched.bench.compare.compare import Comparison, ComparisonPlan, Contender
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import long_blocks_short
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.workers.launch import Side


@dataclass
class StillWorker:
    url: str = "http://127.0.0.1:1"
    name: str = "still"
    command: tuple[str, ...] = ("serve",)

    def check(self) -> None:
        """Succeed, as for a live worker."""


def printed(content: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(content)
    return out.getvalue()


def record(klass: str, sent: float, ticks: list[float], *, prompt: int = 100) -> Outcome:
    return Outcome(sent, klass, prompt, len(ticks), "", sent, ticks, len(ticks))


def canned_round(number: int, short_wait: float) -> Round:
    """Return a round: a long prompt done at 4 s, two waiting shorts and one longer decode."""
    return Round(
        number,
        (
            record("background", -0.5, [-0.1, 1.0, 2.0, 3.0, 4.5, 4.6], prompt=24),
            record("long", 0.0, [3.9, 4.0], prompt=12_000),
            record("short", 0.3, [0.3 + short_wait, 0.4 + short_wait]),
            record("short", 0.5, [0.5 + short_wait, 0.6 + short_wait]),
        ),
        (record("lone", 5.0, [5.01], prompt=100), record("lone", 5.1, [5.12], prompt=100)),
    )


def canned_comparison(
    baseline_waits: tuple[float, ...] = (2.0,), candidate_waits: tuple[float, ...] = (0.5,)
) -> Comparison:
    plan = ComparisonPlan("folder/model", long_blocks_short(longs=1, shorts=2, background=1))
    plan = ComparisonPlan(plan.model, plan.workload, len(baseline_waits))
    still: Any = StillWorker()
    sides = [
        Contender(
            role,
            side.label,
            still,
            {"scheduler": side.name, "policies": side.settings},
            [canned_round(i, wait) for i, wait in enumerate(waits, 1)],
        )
        for role, side, waits in (
            ("baseline", Side("default"), baseline_waits),
            ("candidate", Side("long_prompt", {"long_prompt": {"a<b": 1}}), candidate_waits),
        )
    ]
    return Comparison(plan, sides)

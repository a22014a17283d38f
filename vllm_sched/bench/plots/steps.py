"""A picture of the tokens in each step, against the budget.

Prefill is stacked on decode, so the height is the whole step; the budget is a line. If there are
more steps than columns, each column is a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from vllm_sched.bench.plots.style import COLOURS, MUTED, picture

MAX_COLUMNS: Final = 1200
MICRO: Final = 1e6


@dataclass(frozen=True, slots=True)
class PlottedStep:
    start: float
    end: float
    prefill: float
    decode: float
    budget: float


def steps_of(events: Iterable[Mapping[str, Any]]) -> list[PlottedStep]:
    return [
        PlottedStep(
            event["ts"] / MICRO,
            (event["ts"] + event["dur"]) / MICRO,
            facts["prefill_tokens"],
            facts["tokens"] - facts["prefill_tokens"],
            facts["budget"],
        )
        for event in events
        if event["ph"] == "X" and "budget" in (facts := event["args"])
    ]


def draw_steps(stem: Path, title: str, steps: Sequence[PlottedStep]) -> None:
    shown = columns(steps)
    x: list[float] = []
    decode: list[float] = []
    whole: list[float] = []
    for step, later in zip(shown, [*shown[1:], None], strict=False):
        x.append(step.start)
        decode.append(step.decode)
        whole.append(step.decode + step.prefill)
        if later is None or later.start > step.end:  # idle after this step
            x.append(step.end)
            decode.append(0.0)
            whole.append(0.0)
    with picture(stem, title, "time (s)", "tokens in a step") as axes:
        looks = {"step": "post", "linewidth": 0.4, "edgecolor": COLOURS[4]}
        axes.fill_between(
            x, decode, whole, label="prefill", color="#c9dceb", hatch="///", gid="prefill", **looks
        )
        axes.fill_between(x, decode, label="decode", color=COLOURS[1], gid="decode", **looks)
        axes.plot(
            [step.start for step in shown] + [step.end for step in shown[-1:]],
            [step.budget for step in shown] + [step.budget for step in shown[-1:]],
            drawstyle="steps-post", color=MUTED, linestyle=(0, (5, 2)), linewidth=1.2,
            label="budget", gid="budget",
        )  # fmt: skip
        axes.set_ylim(
            0, 1.25 * max((max(s.budget, s.prefill + s.decode) for s in shown), default=1)
        )
        axes.set_xlim(left=shown[0].start if shown else 0)
        axes.legend(loc="upper right", ncols=3, handlelength=2.4)


def columns(steps: Sequence[PlottedStep], max_columns: int = MAX_COLUMNS) -> list[PlottedStep]:
    """Combine steps that are too narrow to be visible."""
    if len(steps) <= max_columns:
        return list(steps)
    start = steps[0].start
    width = (steps[-1].end - start) / max_columns or 1.0
    columns: dict[int, list[PlottedStep]] = {}
    for step in steps:
        columns.setdefault(int((step.start - start) / width), []).append(step)
    return [
        PlottedStep(
            start + column * width,
            max(start + (column + 1) * width, inside[-1].end),
            fmean(step.prefill for step in inside),
            fmean(step.decode for step in inside),
            fmean(step.budget for step in inside),
        )
        for column, inside in columns.items()
    ]

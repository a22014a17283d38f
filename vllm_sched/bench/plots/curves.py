"""Curves of goodput against rate and throughput against concurrency; TTFT and ITL as log-CCDF."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_sched.bench.plots.style import (
    MUTED,
    label,
    legend,
    limit,
    line_styles,
    picture,
    plain_log,
)
from vllm_sched.bench.results.knee import SERVED_SHARE
from vllm_sched.bench.results.stats import interval


@dataclass(frozen=True)
class Curve:
    """One curve: values per seed at each x, and the knee."""

    points: Mapping[float, Sequence[float]]
    knee: float | None = None


def draw_goodput(stem: Path, curves: Mapping[str, Curve], targets: str) -> None:
    """Draw goodput against the offered rate, with 95 % intervals over the seeds."""
    title = "Goodput against offered load" if targets else "Throughput against offered load"
    y = "requests/s in time" if targets else "requests/s done"
    with picture(stem, title, "offered rate (requests/s)", y) as axes:
        _draw(axes, curves)
        max_rate = max((x for curve in curves.values() for x in curve.points), default=1.0)
        axes.plot([0, max_rate], [0, max_rate], color=MUTED, linewidth=0.9, gid="all")
        top = _top(curves)
        end = min(max_rate, top)
        axes.annotate(
            "offered", (end, end), xytext=(-8, -2), textcoords="offset points", ha="right",
            va="top", color=MUTED,
        )  # fmt: skip
        axes.set_xlim(left=0)
        axes.set_ylim(0, top)
        if targets:
            words = f"in time: {targets}"
            if any(curve.knee is not None for curve in curves.values()):
                words += f"; marked: the highest rate with {SERVED_SHARE:.0%} in time"
            axes.annotate(
                words, (0, -0.16), xycoords="axes fraction", color=MUTED, fontsize=8, va="top",
                annotation_clip=False,
            )  # fmt: skip
        legend(axes, len(curves))


def draw_throughput(stem: Path, curves: Mapping[str, Curve]) -> None:
    title = "Throughput against concurrency"
    with picture(stem, title, "concurrent requests", "tokens/s, prompt and output") as axes:
        _draw(axes, curves)
        axes.set_xscale("log", base=2)
        ticks = sorted({x for curve in curves.values() for x in curve.points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, _top(curves))
        legend(axes, len(curves))


def draw_latency(stem: Path, curves: Mapping[str, Curve], target_ms: float | None) -> None:
    title = "Time to first token against offered load"
    with picture(stem, title, "offered rate (requests/s)", "TTFT p99 (ms)") as axes:
        _draw(axes, curves)
        axes.set_yscale("log")
        axes.set_xlim(left=0)
        if target_ms is not None:
            limit(axes, target_ms, f"target {target_ms:g} ms", upright=False)
        plain_log(axes.yaxis)
        legend(axes, len(curves))


def _top(curves: Mapping[str, Curve]) -> float:
    """Return the upper limit of y; very wide intervals may exceed the picture."""
    means = [interval(values)[0] for curve in curves.values() for values in curve.points.values()]
    return 1.4 * max((mean for mean in means if not math.isnan(mean)), default=1.0) or 1.0


def _draw(axes: Any, curves: Mapping[str, Curve]) -> None:
    for look, (name, curve) in zip(line_styles(len(curves)), curves.items(), strict=True):
        xs = sorted(curve.points)
        intervals = [interval([v for v in curve.points[x] if not math.isnan(v)]) for x in xs]
        axes.errorbar(
            xs,
            [mean for mean, _ in intervals],
            yerr=[half for _, half in intervals],
            capsize=3,
            elinewidth=1,
            label=label(name),
            gid="line",
            **look,
        )
        if curve.knee is not None and curve.knee in curve.points:
            y = interval(curve.points[curve.knee])[0]
            axes.plot(
                [curve.knee], [y], marker="o", markersize=13, fillstyle="none", linestyle="none",
                color=look["color"], markeredgewidth=1.4, gid="knee",
            )  # fmt: skip
            axes.annotate(
                f"knee {curve.knee:g}", (curve.knee, y), xytext=(10, -16), ha="left",
                textcoords="offset points", color=look["color"],
            )  # fmt: skip


CURVE_POINTS: Final = 400
MIN_DRAWN_MS: Final = 0.1  # gaps within one packet are 0, which has no logarithm


def draw_tail(
    stem: Path,
    title: str,
    measure: str,
    groups: Mapping[str, Sequence[float]],
    target_s: float | None = None,
) -> None:
    """Draw one line per group of samples in seconds; empty groups are left out."""
    shown = {name: sorted(samples) for name, samples in groups.items() if samples}
    with picture(stem, title, f"{measure} (ms)", "share of samples above") as axes:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for look, (name, ordered) in zip(line_styles(len(shown)), shown.items(), strict=True):
            x, y = ccdf(ordered)
            axes.plot(
                [max(MIN_DRAWN_MS, value * 1000) for value in x],
                y,
                label=label(f"{name} ({len(ordered):,})"),
                drawstyle="steps-post",
                markevery=0.12,
                gid="line",
                **look,
            )
        if shown:
            axes.set_ylim(0.7 / max(map(len, shown.values())), 1.1)
        plain_log(axes.yaxis, " %", 100)
        if target_s is not None:
            limit(axes, target_s * 1000, f"target {target_s * 1000:g} ms", upright=True)
        plain_log(axes.xaxis)
        legend(axes, len(shown))


def ccdf(ordered: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return latencies and the share of samples at or above each.

    Of many samples only some are kept, but all near the tail.
    """
    total = len(ordered)
    # Ranks from the top: all of the last samples, then geometric steps.
    ranks = {1, total}
    step = max(1.0001, total ** (1 / CURVE_POINTS))
    rank = 1.0
    while rank < total:
        ranks.add(round(rank))
        rank = max(rank + 1, rank * step)
    chosen = sorted(ranks, reverse=True)
    return [ordered[total - rank] for rank in chosen], [rank / total for rank in chosen]

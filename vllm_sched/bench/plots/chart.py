"""A chart of lines and dots, for commands that draw a single SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_sched.bench.plots.style import (
    MUTED,
    check_available,
    label,
    legend,
    limit,
    line_styles,
    picture,
    plain_log,
)
from vllm_sched.errors import UsageError

SUFFIX: Final = ".svg"
INCHES: Final = (8.6, 4.8)


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    series: Sequence[Series]
    subtitle: str = ""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True  # the y axis, unless logarithmic
    marks: Sequence[tuple[float, str]] = ()  # vertical lines with a label


def check_chart(path: Path) -> None:
    if path.suffix != SUFFIX:
        raise UsageError(f"--plot {path}: the picture is an SVG; give a name that ends in {SUFFIX}")
    check_available()


def draw_chart(chart: Chart, path: Path) -> None:
    stem = path.with_suffix("")
    with picture(stem, chart.title, chart.x, chart.y, inches=INCHES, suffixes=(SUFFIX,)) as axes:
        if chart.subtitle:
            axes.set_title(chart.title, pad=20)
            axes.text(0, 1.02, chart.subtitle, transform=axes.transAxes, color=MUTED, fontsize=8)
        for look, series in zip(line_styles(len(chart.series)), chart.series, strict=True):
            drawn = {"linestyle": "none", "fillstyle": "none"} if series.dots else {"marker": ""}
            name, points = label(series.name), zip(*series.points, strict=True)
            axes.plot(*points, label=name, gid="line", **look | drawn)
        if chart.log_x:
            axes.set_xscale("log")
            plain_log(axes.xaxis)
        if chart.log_y:
            axes.set_yscale("log")
            plain_log(axes.yaxis)
        elif chart.from_zero:
            axes.set_ylim(bottom=0)
        if chart.marks:
            *others, last = sorted(chart.marks)
            for row, (at, text) in enumerate(others):
                limit(axes, at, text, upright=True, row=row, left=True)  # crosses no other line
            limit(axes, *last, upright=True)
        legend(axes, len(chart.series))

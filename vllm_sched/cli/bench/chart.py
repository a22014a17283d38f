"""A chart of lines and dots as one SVG file, without dependencies.

Dashes and markers tell the series apart without colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

from vllm_sched.errors import UsageError

SUFFIX: Final = ".svg"
WIDTH, HEIGHT = 860.0, 480.0
LEFT, RIGHT, TOP, BOTTOM = 78.0, 24.0, 92.0, 56.0
COLOURS: Final = ("#0072b2", "#b24a00", "#007a5a", "#a0527f")
DASHES: Final = ("", "7 4", "2 3", "9 3 2 3")
TICKS: Final = 6

STYLE: Final = """
.chart{--paper:#ffffff;--ink:#1c2024;--soft:#62696f;--rule:#e4e7e9;
font-family:ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px}
@media (prefers-color-scheme:dark){.chart{--paper:#14171a;--ink:#e8eaec;--soft:#9aa3aa;
--rule:#2a2f34}}
.chart .paper{fill:var(--paper)}.chart text{fill:var(--ink)}.chart .soft{fill:var(--soft)}
.chart .h1{font-size:17px;font-weight:650}.chart .rule{stroke:var(--rule)}
.chart .line{fill:none;stroke-width:2}.chart .mark{stroke-dasharray:2 3;stroke:var(--soft)}
"""


@dataclass(frozen=True)
class Series:
    """A line or a set of dots."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart's content."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    subtitle: str = ""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True  # the y axis, unless logarithmic
    marks: Sequence[tuple[float, str]] = field(default=())  # vertical lines with a label


def check_suffix(path: Path) -> None:
    if path.suffix != SUFFIX:
        raise UsageError(f"--plot {path}: the picture is an SVG; give a name that ends in {SUFFIX}")


def draw(chart: Chart) -> str:
    points = [point for series in chart.series for point in series.points]
    if not points:
        raise UsageError(f"{chart.title}: there is nothing to draw")
    x = _Axis([p[0] for p in points], LEFT, WIDTH - RIGHT, log=chart.log_x)
    y = _Axis(
        [p[1] for p in points] + ([0.0] if chart.from_zero and not chart.log_y else []),
        HEIGHT - BOTTOM,
        TOP,
        log=chart.log_y,
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH:g} '
            f'{HEIGHT:g}" width="{WIDTH:g}" height="{HEIGHT:g}" role="img" '
            f'aria-label="{escape(chart.title)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH:g}" height="{HEIGHT:g}"/>',
            _text(24, 30, chart.title, "h1"),
            _text(24, 49, chart.subtitle, "soft"),
            *_legend(chart.series),
            *_grid(chart, x, y),
            *(part for n, series in enumerate(chart.series) for part in _series(series, n, x, y)),
            "</svg>",
            "",
        ]
    )


class _Axis:
    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool) -> None:
        self._log = log
        low, high = min(values), max(values)
        if log:
            low, high = max(low, 1e-9), max(high, 1e-9)
            self.ticks = [
                head * 10.0**power
                for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
                for head in (1, 2, 5)
                if low / 1.5 <= head * 10.0**power <= high * 1.5
            ]
            low, high = min(low, *self.ticks), max(high, *self.ticks)
        else:
            high = high if high > low else low + 1.0
            step = _round_step((high - low) / TICKS)
            first, last = math.floor(low / step), math.ceil(high / step)
            self.ticks = [n * step for n in range(first, last + 1)]
            low, high = self.ticks[0], self.ticks[-1]
        self._low, self._high, self._start, self._end = low, high, start, end

    def at(self, value: float) -> float:
        low, high = self._low, self._high
        if self._log:
            value, low, high = (math.log(max(each, 1e-9)) for each in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return self._start + share * (self._end - self._start)


def _round_step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(head * unit for head in (1, 2, 5, 10) if head * unit >= rough * 0.999)


def _grid(chart: Chart, x: _Axis, y: _Axis) -> Iterator[str]:
    for tick in y.ticks:
        yield _line(LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick), "rule")
        yield _text(LEFT - 8, y.at(tick) + 4, f"{tick:.6g}", "soft", "end")
    for tick in x.ticks:
        yield _line(x.at(tick), HEIGHT - BOTTOM, x.at(tick), HEIGHT - BOTTOM + 5, "rule")
        yield _text(x.at(tick), HEIGHT - BOTTOM + 19, f"{tick:.6g}", "soft", "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, chart.x, anchor="middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text transform="translate(20 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y)}</text>"
    )
    for n, (at, word) in enumerate(chart.marks):
        yield _line(x.at(at), TOP, x.at(at), HEIGHT - BOTTOM, "mark")
        yield _text(x.at(at) + 4, TOP + 12 + 14 * (n % 3), word, "soft")


def _series(series: Series, number: int, x: _Axis, y: _Axis) -> Iterator[str]:
    colour = COLOURS[number % len(COLOURS)]
    places = [(x.at(px), y.at(py)) for px, py in series.points]
    if series.dots:
        for px, py in places:
            yield _marker(number, px, py, colour)
        return
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    yield (
        f'<polyline class="line" stroke="{colour}" '
        f'stroke-dasharray="{DASHES[number % len(DASHES)]}" points="{path}"/>'
    )


def _legend(series: Sequence[Series]) -> Iterator[str]:
    left = 24.0
    for number, each in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        if each.dots:
            yield _marker(number, left + 13, 68, colour)
        else:
            yield (
                f'<line class="line" stroke="{colour}" '
                f'stroke-dasharray="{DASHES[number % len(DASHES)]}" x1="{left:.1f}" y1="68" '
                f'x2="{left + 26:.1f}" y2="68"/>'
            )
        yield _text(left + 32, 72, each.name)
        left += 48 + 6.6 * len(each.name)


def _marker(number: int, x: float, y: float, colour: str) -> str:
    look = f'fill="none" stroke="{colour}" stroke-width="1.4"'
    match number % 4:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {look}/>'
        case 1:
            return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" {look}/>'
        case 2:
            return f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z" {look}/>'
        case _:
            return f'<path d="M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z" {look}/>'


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{name}" text-anchor="{anchor}">{escape(text)}</text>'
    )

"""Tables of the frontier, and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

from rich import box
from rich.table import Table

from benchmarks.frontier.cells import BASELINES, DEFAULT, UPSTREAM
from benchmarks.frontier.play import Figures
from vllm_sched.bench.plots.style import line_styles, picture

HEADINGS: Final = ("short TTFT p99", "long TTFT mean", "ITL p99", "tokens/s")
BLOCKED: Final = ("bursts of 8",)  # loads in which shorts have two or more longs ahead
NOTHING_TO_GAIN: Final = ("chats only", "embeddings")
ITL_TARGET_S: Final = 0.1
NOISE: Final = 0.05  # a baseline dominates if it is better by more in one figure
Ratios: TypeAlias = tuple[float | None, ...]
Found: TypeAlias = Mapping[str, Sequence[Figures]]  # of each variant, by seed


def ratios(found: Found, name: str) -> Ratios:
    """Return a variant's figures over vLLM's own, medians over the seeds."""
    pairs = list(zip(map(astuple, found[name]), map(astuple, found[UPSTREAM]), strict=True))
    return tuple(
        median(own[i] / theirs[i] for own, theirs in pairs) if pairs[0][1][i] else None
        for i in range(len(fields(Figures)))
    )


def dominated_by(found: Found, name: str) -> list[str]:
    """Return the baselines that are as good in each figure and better in one, in most seeds."""

    def wins(other: str) -> float:
        return median(
            theirs.dominates(own, NOISE)
            for own, theirs in zip(found[name], found[other], strict=True)
        )

    return [other for other in BASELINES if other in found and other != name and wins(other) == 1]


def table(title: str, found: Found) -> Table:
    """Return one cell: vLLM's figures, and those of the variants relative to them."""
    layout = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", *HEADINGS, "dominated by"):
        layout.add_column(heading, justify="left" if heading in ("", "dominated by") else "right")
    for name in found:
        if name == UPSTREAM:
            cells = [_middle(each) for each in zip(*map(astuple, found[name]), strict=True)]
        else:
            cells = ["" if r is None else f"x{r:.2f}" for r in ratios(found, name)]
        layout.add_row(name, *cells, ", ".join(dominated_by(found, name)))
    return layout


def _middle(figures: Sequence[float | None]) -> str:
    known = [figure for figure in figures if figure is not None]
    if not known:
        return ""
    middle = median(known)
    return f"{middle:.3f} s" if middle < 1000 else f"{middle:.0f}"


def missed(load: str, found: Found) -> list[str]:
    """Return the targets of the default policy that it misses in a cell."""
    short, long, itl, rate = ratios(found, DEFAULT)
    itl_s = median(f.itl_p99 or 0.0 for f in found[DEFAULT])
    most_short = 0.07 if load in BLOCKED else 1.02 if load in NOTHING_TO_GAIN else None
    return [
        text
        for text, is_missed in (
            (f"tokens/s x{rate:.3f}", rate is not None and rate < 0.98),
            (f"longs x{long or 0:.2f}", long is not None and long > 1.05),
            (
                f"ITL x{itl or 0:.2f}, {itl_s * 1000:.0f} ms",
                itl is not None and itl > 1.005 and itl_s > ITL_TARGET_S,
            ),
            (f"shorts x{short or 0:.2f}", bool(most_short and short and short > most_short)),
            *((f"dominated by {name}", True) for name in dominated_by(found, DEFAULT)),
        )
        if is_missed
    ]


def draw(stem: Path, cells: Mapping[str, Found]) -> None:
    """Draw each variant in each cell with long prompts: longs' delay and shorts' gain."""
    names = [name for name in next(iter(cells.values())) if name != UPSTREAM]
    title = "short prompts' TTFT p99 and long prompts' mean TTFT, relative to vLLM's scheduler"
    with picture(stem, title, "long prompts", "short prompts") as axes:
        for name, style in zip(names, line_styles(len(names)), strict=True):
            points = [ratios(found, name)[:2] for found in cells.values()]
            known = [(long, short) for short, long in points if short and long]
            axes.scatter(*zip(*known, strict=True), label=name, color=style["color"], s=14)
        axes.set_yscale("log")
        axes.axvline(1.05, linewidth=0.8, color="grey")
        axes.axhline(0.07, linewidth=0.8, color="grey")
        axes.legend(fontsize="small")

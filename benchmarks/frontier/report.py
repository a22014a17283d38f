"""Tables of the frontier, and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

from rich import box
from rich.table import Table

from benchmarks.frontier.cells import BASELINES, DEFAULT, UPSTREAM
from benchmarks.frontier.play import Figures
from vllm_sched.bench.plots.style import line_styles, picture, plain_log

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
    """Draw long prompts' delay and short prompts' gain by policy, a panel for each load.

    A point is the median of the machines and budgets; its bars reach the least and the worst.
    """
    loads: dict[str, list[Found]] = {}
    for cell, found in cells.items():
        if all(ratios(found, DEFAULT)[:2]):  # not of chats or embeddings alone
            loads.setdefault(cell.rpartition(", ")[2], []).append(found)
    names = [name for name in next(iter(cells.values())) if name != UPSTREAM]
    with picture(stem, "", "", "", inches=(9.5, 7.4)) as whole:
        figure = whole.figure
        whole.remove()
        figure.suptitle("Time to first token, relative to vLLM's scheduler", weight="bold")
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for panel in panels[-1]:
            panel.set_xlabel("long prompts, mean")
        for panel in panels[:, 0]:
            panel.set_ylabel("short prompts, p99")
        for panel, (load, founds) in zip(panels.flat, loads.items(), strict=False):
            panel.set_title(load, fontsize="medium")
            panel.plot(1, 1, "*", color="black", markersize=11, label="vLLM's scheduler")
            for name, style in zip(names, line_styles(len(names)), strict=True):
                _draw_variant(panel, [ratios(found, name) for found in founds], name, style)
            panel.set_xscale("log")
            panel.set_yscale("log")
            plain_log(panel.xaxis, "x")
            plain_log(panel.yaxis, "x")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _draw_variant(panel: Any, figures: Sequence[Ratios], name: str, style: dict[str, Any]) -> None:
    shorts, longs = ([each[i] or 1.0 for each in figures] for i in (0, 1))
    x, y = median(longs), median(shorts)
    panel.errorbar(
        x,
        y,
        xerr=[[x - min(longs)], [max(longs) - x]],
        yerr=[[y - min(shorts)], [max(shorts) - y]],
        color=style["color"],
        marker=style["marker"],
        linestyle="none",
        elinewidth=0.6,
        label=name,
    )

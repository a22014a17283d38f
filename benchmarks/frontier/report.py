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
# Largest ratio of shorts' TTFT to vLLM's: in bursts, shorts have several longs ahead; in the other
# loads there is nothing to gain.
MOST_SHORT: Final = {
    "bursts of 8": 0.07, "16 documents": 0.07, "chats only": 1.02, "embeddings": 1.02,
}  # fmt: skip
ITL_TARGET_S: Final = 0.1
NOISE: Final = 0.05  # a baseline dominates if it is better by more in one figure
Ratios: TypeAlias = tuple[float | None, ...]
VariantFigures: TypeAlias = Mapping[str, Sequence[Figures]]  # by variant, for each seed


def ratios(variants: VariantFigures, name: str) -> Ratios:
    """Return a variant's figures over vLLM's own, medians over the seeds."""
    seeds = list(zip(variants[name], variants[UPSTREAM], strict=True))
    result = []
    for field in fields(Figures):
        pairs = [(getattr(own, field.name), getattr(theirs, field.name)) for own, theirs in seeds]
        has_requests = bool(pairs[0][1])
        result.append(median(own / theirs for own, theirs in pairs) if has_requests else None)
    return tuple(result)


def dominated_by(variants: VariantFigures, name: str) -> list[str]:
    """Return the baselines that are as good in each figure and better in one, in most seeds."""
    dominating = []
    for baseline in BASELINES:
        if baseline in variants and baseline != name:
            seeds = zip(variants[baseline], variants[name], strict=True)
            if median(theirs.dominates(ours, NOISE) for theirs, ours in seeds) == 1:
                dominating.append(baseline)
    return dominating


def table(title: str, variants: VariantFigures) -> Table:
    """Return one cell: vLLM's figures, and those of the variants relative to them."""
    layout = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", *HEADINGS, "dominated by"):
        layout.add_column(heading, justify="left" if heading in ("", "dominated by") else "right")
    for name, seeds in variants.items():
        if name == UPSTREAM:
            cells = [_median_text(values) for values in zip(*map(astuple, seeds), strict=True)]
        else:
            cells = ["" if r is None else f"x{r:.2f}" for r in ratios(variants, name)]
        layout.add_row(name, *cells, ", ".join(dominated_by(variants, name)))
    return layout


def _median_text(values: Sequence[float | None]) -> str:
    measured = [value for value in values if value is not None]
    if not measured:
        return ""
    middle = median(measured)
    return f"{middle:.3f} s" if middle < 1000 else f"{middle:.0f}"


def missed_targets(load: str, variants: VariantFigures) -> list[str]:
    """Return the targets of the default policy that it misses in a cell."""
    short, long, itl, rate = ratios(variants, DEFAULT)
    itl_s = median(figures.itl_p99 or 0.0 for figures in variants[DEFAULT])
    missed = []
    if rate is not None and rate < 0.98:
        missed.append(f"tokens/s x{rate:.3f}")
    if long is not None and long > 1.05:
        missed.append(f"longs x{long:.2f}")
    if itl is not None and itl > 1.005 and itl_s > ITL_TARGET_S:
        missed.append(f"ITL x{itl:.2f}, {itl_s * 1000:.0f} ms")
    most_short = MOST_SHORT.get(load)
    if most_short is not None and short is not None and short > most_short:
        missed.append(f"shorts x{short:.2f}")
    return missed + [f"dominated by {name}" for name in dominated_by(variants, DEFAULT)]


def draw(stem: Path, cells: Mapping[str, VariantFigures]) -> None:
    """Draw long prompts' delay and short prompts' gain by policy, a panel for each load.

    A point is the median of the machines and budgets; its bars reach the least and the worst.
    """
    loads: dict[str, list[VariantFigures]] = {}
    for cell, variants in cells.items():
        if all(ratios(variants, UPSTREAM)[:2]):  # not of chats or embeddings alone
            loads.setdefault(cell.rpartition(", ")[2], []).append(variants)
    names = [name for name in next(iter(cells.values())) if name != UPSTREAM]
    with picture(stem, "", "", "", inches=(12.0, 7.4)) as whole:
        figure = whole.figure
        whole.remove()
        figure.suptitle("Time to first token, relative to vLLM's scheduler", weight="bold")
        panels = figure.subplots(2, 3, sharex=True, sharey=True)
        in_use, unused = panels.flat[: len(loads)], panels.flat[len(loads) :]
        for panel in in_use[-panels.shape[1] :]:
            panel.set_xlabel("long prompts, mean")
            panel.tick_params(labelbottom=True)
        for panel in panels[:, 0]:
            panel.set_ylabel("short prompts, p99")
        for panel, (load, of_load) in zip(in_use, loads.items(), strict=True):
            panel.set_title(load, fontsize="medium")
            panel.plot(1, 1, "*", color="black", markersize=11, label="vLLM's scheduler")
            for name, style in zip(names, line_styles(len(names)), strict=True):
                _draw_variant(panel, [ratios(variants, name) for variants in of_load], name, style)
            panel.set_xscale("log")
            panel.set_yscale("log")
            plain_log(panel.xaxis, "x")
            plain_log(panel.yaxis, "x")
        for panel in unused:
            panel.set_axis_off()
        handles, labels = panels.flat[0].get_legend_handles_labels()
        panels.flat[-1].legend(handles, labels, loc="center", fontsize="large")


def _draw_variant(panel: Any, figures: Sequence[Ratios], name: str, style: dict[str, Any]) -> None:
    shorts, longs = ([figure[i] or 1.0 for figure in figures] for i in (0, 1))
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

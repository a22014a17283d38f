"""The table of a load, and the goodput where the peers' rule first misses its targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Final, TypeAlias

from rich import box
from rich.table import Table

from benchmarks.agents.play import Figures
from benchmarks.agents.sides import CACHE_AWARE, ROWS, SCORES
from benchmarks.agents.targets import SERVED

TARGET: Final = 1.3
HEADINGS: Final = (
    "", "turns/s in time", "in time", "task p50", "p90", "x alone p50", "p90",
    "TTFT p50", "p90", "p99", "TPOT p90", "hits", "tokens/s", "failed",
)  # fmt: skip
RunsBySide: TypeAlias = dict[str, list[Figures]]  # by seed


def mean(runs: list[Figures], figure: str) -> float:
    return fmean(getattr(run, figure) for run in runs)


def table(at_once: int, by_side: RunsBySide) -> Table:
    title = f"{at_once} sessions at once"
    layout = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        layout.add_column(heading, justify="right" if heading else "left")
    for side, runs in by_side.items():
        layout.add_row(
            side,
            f"{mean(runs, 'goodput'):.2f}",
            f"{mean(runs, 'in_time'):.1%}",
            f"{mean(runs, 'task_p50'):,.0f} s",
            f"{mean(runs, 'task_p90'):,.0f} s",
            f"{mean(runs, 'stretch_p50'):.2f}",
            f"{mean(runs, 'stretch_p90'):.2f}",
            f"{mean(runs, 'ttft_p50'):.2f} s",
            f"{mean(runs, 'ttft_p90'):.1f} s",
            f"{mean(runs, 'ttft_p99'):.1f} s",
            f"{mean(runs, 'tpot_p90') * 1000:.0f} ms",
            f"{mean(runs, 'hit'):.1%}",
            f"{mean(runs, 'tokens_per_s'):,.0f}",
            str(sum(run.failed for run in runs)),
        )
    return layout


def first_miss(by_load: Mapping[int, RunsBySide], side: str) -> int | None:
    """Return the least load at which a side has too many late turns."""
    loads = sorted(load for load in by_load if side in by_load[load])
    return next((load for load in loads if mean(by_load[load][side], "in_time") < SERVED), None)


def verdicts(by_load: Mapping[int, RunsBySide]) -> Iterator[str]:
    """Yield the load where the better peers' rule first misses, and the goodput of ours there."""
    peers = [
        side
        for side in (CACHE_AWARE, SCORES)
        if any(side in by_side for by_side in by_load.values())
    ]
    if not peers:
        yield "no peers' rule was played: nothing to compare with"
        return
    misses = {side: first_miss(by_load, side) for side in peers}
    if any(load is None for load in misses.values()):
        yield "a peers' rule serves every load"
        return
    peer = max(peers, key=lambda side: misses[side] or 0)
    load = misses[peer] or 0
    yield f"{peer}: fewer than {SERVED:.0%} of the turns are in time with {load} sessions at once"
    if not all(run.goodput for run in by_load[load][peer]):
        yield "a run of it has no turn in time: no ratio to compare"
        return
    own = [side for side, spec in ROWS.items() if not spec.peer and side in by_load[load]]
    for side in own:
        pairs = zip(by_load[load][side], by_load[load][peer], strict=True)
        ratios = [ours.goodput / theirs.goodput for ours, theirs in pairs]
        met = "" if fmean(ratios) >= TARGET else f", less than {TARGET:g}x: missed"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}x"
        yield f"{side}: {fmean(ratios):.2f}x its goodput there ({spread}){met}"
        yield f"  first misses at {first_miss(by_load, side) or 'no load'}"

"""The table of a cell, and its targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Final

from rich import box
from rich.table import Table

from benchmarks.cache_pressure.play import Cell, Figures
from benchmarks.cache_pressure.sides import ESTIMATE, EXACT, LOAD, ORACLE

MIN_HITS: Final = 0.97  # of the oracle's
MIN_THROUGHPUT: Final = 1.10  # of the estimate's, at this pressure
TARGET_PRESSURE: Final = 2.0
HEADINGS: Final = (
    "", "hits", "requests/s", "tokens/s", "TTFT p50", "p90", "p99", "within a block", "mean error",
)  # fmt: skip
RunsBySide = Mapping[str, Sequence[Figures]]  # by seed


def table(cell: Cell, by_side: RunsBySide) -> Table:
    """Return one cell: means over the seeds, and medians of times."""
    layout = Table(title=str(cell), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        layout.add_column(heading, justify="right" if heading else "left")
    for side, runs in by_side.items():
        predicts = side != LOAD
        layout.add_row(
            side,
            f"{fmean(f.hit for f in runs):.1%}",
            f"{fmean(f.requests_per_s for f in runs):.2f}",
            f"{fmean(f.tokens_per_s for f in runs):,.0f}",
            f"{median(f.ttft_p50 for f in runs):.2f} s",
            f"{median(f.ttft_p90 for f in runs):.2f} s",
            f"{median(f.ttft_p99 for f in runs):.2f} s",
            f"{fmean(f.within_block for f in runs):.1%}" if predicts else "",
            f"{fmean(f.error_tokens for f in runs):,.0f} tokens" if predicts else "",
        )
    return layout


def hits_ratio(by_side: RunsBySide) -> float:
    return fmean(f.hit for f in by_side[EXACT]) / fmean(f.hit for f in by_side[ORACLE])


def throughput_ratios(
    by_side: RunsBySide, side: str = EXACT, figure: str = "requests_per_s"
) -> list[float]:
    """Return a side's throughput over that of the estimate, by seed."""
    pairs = zip(by_side[side], by_side[ESTIMATE], strict=True)
    return [getattr(own, figure) / getattr(estimate, figure) for own, estimate in pairs]


def verdicts(cell: Cell, by_side: RunsBySide) -> list[tuple[str, bool]]:
    """Return a line for each target, and whether it is met."""
    ratio = hits_ratio(by_side)
    lines = [(f"exact has {ratio:.3f}x the oracle's hits", ratio >= MIN_HITS)]
    if cell.rate is None:
        ratios, best = throughput_ratios(by_side), throughput_ratios(by_side, ORACLE)
        tokens = throughput_ratios(by_side, figure="tokens_per_s")
        text = (
            f"exact has {fmean(ratios):.2f}x the estimate's requests/s "
            f"({min(ratios):.2f} to {max(ratios):.2f}x), {fmean(tokens):.2f}x its tokens/s; "
            f"the oracle has {fmean(best):.2f}x its requests/s"
        )
        met = cell.pressure != TARGET_PRESSURE or fmean(ratios) >= MIN_THROUGHPUT
        lines.append((text, met))
    if failed := sum(f.failed for runs in by_side.values() for f in runs):
        lines.append((f"{failed} requests failed", False))
    return lines

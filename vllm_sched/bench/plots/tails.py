"""Pictures of TTFT and ITL as log-CCDF, down to the last sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm_sched.bench.plots.style import label, legend, limit, line_styles, picture, plain_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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


def ccdf(ordered: Sequence[float], points: int = CURVE_POINTS) -> tuple[list[float], list[float]]:
    """Return latencies and the share of samples at or above each.

    Of many samples only some are kept, but all near the tail.
    """
    total = len(ordered)
    # Ranks from the top: all of the last samples, then geometric steps.
    ranks = {1, total}
    step = max(1.0001, total ** (1 / points))
    rank = 1.0
    while rank < total:
        ranks.add(round(rank))
        rank = max(rank + 1, rank * step)
    chosen = sorted(ranks, reverse=True)
    return [ordered[total - rank] for rank in chosen], [rank / total for rank in chosen]

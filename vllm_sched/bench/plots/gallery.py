"""Which pictures a run and a sweep come with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_sched.bench.plots.crowd import draw_router, draw_tenants
from vllm_sched.bench.plots.curves import draw_goodput, draw_latency, draw_throughput
from vllm_sched.bench.plots.style import files
from vllm_sched.bench.plots.tails import draw_tail

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vllm_sched.bench.plots.curves import Curve
    from vllm_sched.bench.result import Result


def draw_run(result: Result, folder: Path) -> list[Path]:
    """Draw a run: the tails always; tenants and workers where it had any."""
    good = [each for each in result.outcomes if each.good]
    names = list(dict.fromkeys(each.klass for each in good))
    name = result.schedule.source.name
    drawn: list[Path] = []
    draw_tail(
        folder / "ttft",
        f"Time to first token, {name}",
        "TTFT",
        {klass: [o.ttft for o in good if o.klass == klass] for klass in names},
        result.targets.ttft,
    )
    drawn += files(folder / "ttft")
    gaps = {klass: [gap for o in good if o.klass == klass for gap in o.itls] for klass in names}
    if any(gaps.values()):  # answers of one token, or of which no more was told, have none
        title = f"Gaps between tokens, {name}"
        draw_tail(folder / "itl", title, "ITL", gaps, result.targets.itl)
        drawn += files(folder / "itl")
    if any(each.tenant for each in good):
        draw_tenants(folder / "tenants", good)
        drawn += files(folder / "tenants")
    if any(each.worker for each in result.outcomes):
        draw_router(folder / "router", result.outcomes)
        drawn += files(folder / "router")
    return drawn


def draw_sweep(
    folder: Path,
    *,
    goodput: Mapping[str, Curve] | None = None,
    ttft: Mapping[str, Curve] | None = None,
    throughput: Mapping[str, Curve] | None = None,
    targets: Mapping[str, float | None] | None = None,
) -> list[Path]:
    """Draw the curves that a sweep found."""
    limits = {name: value for name, value in (targets or {}).items() if value is not None}
    drawn: list[Path] = []
    if goodput:
        words = ", ".join(f"{name.upper()} {value:g} ms" for name, value in limits.items())
        draw_goodput(folder / "goodput", goodput, words)
        drawn += files(folder / "goodput")
    if ttft:
        draw_latency(folder / "ttft-by-rate", ttft, limits.get("ttft"))
        drawn += files(folder / "ttft-by-rate")
    if throughput:
        draw_throughput(folder / "throughput", throughput)
        drawn += files(folder / "throughput")
    return drawn

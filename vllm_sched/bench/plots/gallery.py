"""The pictures of a run and of a sweep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.plots.crowd import OTHERS, draw_router, draw_tenants
from vllm_sched.bench.plots.curves import draw_goodput, draw_latency, draw_tail, draw_throughput
from vllm_sched.bench.plots.style import files
from vllm_sched.bench.results.outcome import Outcome

if TYPE_CHECKING:
    from vllm_sched.bench.plots.curves import Curve
    from vllm_sched.bench.results.result import BenchResult

MAX_CLASS_LINES: Final = 6  # most lines in a picture of a run


def draw_run(result: BenchResult, folder: Path) -> list[Path]:
    """Draw a run: latency tails, and tenants and workers if there are any; return the files."""
    good = [outcome for outcome in result.outcomes if outcome.good]
    classes = _by_class(good)
    name = result.schedule.source.name
    drawn: list[Path] = []
    draw_tail(
        folder / "ttft",
        f"Time to first token, {name}",
        "TTFT",
        {name: [outcome.ttft for outcome in of_class] for name, of_class in classes.items()},
        result.targets.ttft,
    )
    drawn += files(folder / "ttft")
    gaps = {
        name: [gap for outcome in of_class for gap in outcome.itls]
        for name, of_class in classes.items()
    }
    if any(gaps.values()):  # single tokens, and coarse simulations, have no gaps
        title = f"Gaps between tokens, {name}"
        draw_tail(folder / "itl", title, "ITL", gaps, result.targets.itl)
        drawn += files(folder / "itl")
    if any(outcome.tenant for outcome in good):
        draw_tenants(folder / "tenants", good)
        drawn += files(folder / "tenants")
    if any(outcome.worker for outcome in result.outcomes):
        draw_router(folder / "router", result.outcomes)
        drawn += files(folder / "router")
    return drawn


def _by_class(outcomes: Sequence[Outcome]) -> Mapping[str, Sequence[Outcome]]:
    """Return the outcomes by class in order of arrival; rare classes are combined."""
    counts = Counter(outcome.klass for outcome in outcomes)
    max_named = len(counts) if len(counts) <= MAX_CLASS_LINES else MAX_CLASS_LINES - 1
    named = {name for name, _ in counts.most_common(max_named)}
    outcomes_of: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        outcomes_of[outcome.klass if outcome.klass in named else OTHERS].append(outcome)
    return outcomes_of


def draw_sweep(
    folder: Path,
    *,
    goodput: Mapping[str, Curve] | None = None,
    ttft: Mapping[str, Curve] | None = None,
    throughput: Mapping[str, Curve] | None = None,
    targets: Mapping[str, float | None] | None = None,
) -> list[Path]:
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

"""Pictures of tokens per tenant over time, and of a router's distribution of requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_sched.bench.plots.style import (
    INCHES,
    check_available,
    in_full,
    label,
    legend,
    line_styles,
    picture,
)
from vllm_sched.bench.results.outcome import Outcome

MAX_TENANT_LINES: Final = 6
OTHERS: Final = "the others"
NO_TENANT: Final = "no tenant"
BINS: Final = 60
MAX_WORKER_NAMES: Final = 40  # most worker names in a picture


def draw_tenants(stem: Path, outcomes: Sequence[Outcome]) -> None:
    served = served_by_tenant(outcomes)
    title = "Tokens served per tenant"
    with picture(stem, title, "seconds since the start", "tokens, prompt and output") as axes:
        for look, (name, steps) in zip(line_styles(len(served)), served.items(), strict=True):
            axes.plot(
                [at for at, _ in steps],
                [tokens for _, tokens in steps],
                label=label(name),
                drawstyle="steps-post",
                markevery=0.15,
                gid="line",
                **look,
            )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        in_full(axes.yaxis)
        legend(axes, len(served))


def served_by_tenant(outcomes: Sequence[Outcome]) -> dict[str, list[tuple[float, float]]]:
    events: dict[str, list[tuple[float, float]]] = defaultdict(list)
    totals: Counter[str] = Counter()
    for outcome in outcomes:
        if not outcome.ticks:
            continue
        tokens = [(outcome.ticks[0], float(outcome.prompt_tokens))]
        # An event with several tokens counts for all of them.
        worth = max(outcome.completed, len(outcome.ticks)) / len(outcome.ticks)
        tokens += [(tick, worth) for tick in outcome.ticks]
        tenant = outcome.tenant or NO_TENANT
        events[tenant] += tokens
        totals[tenant] += outcome.prompt_tokens + outcome.completed
    named = [name for name, _ in totals.most_common()]
    if len(named) > MAX_TENANT_LINES:
        for name in named[MAX_TENANT_LINES - 1 :]:
            events[OTHERS] += events.pop(name)
        named = [*named[: MAX_TENANT_LINES - 1], OTHERS]
    return {name: _cumulative(sorted(events[name])) for name in named}


def draw_router(stem: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw one strip per worker, darker for more prompt tokens per second.

    The scale is a square root, so that short prompts remain visible next to a long one.
    """
    check_available()
    from matplotlib.colors import PowerNorm

    workers, seconds, rows = sent_to_workers(outcomes)
    height = max(2.2, min(9.0, 1.4 + 0.38 * len(workers)))
    title = "Where the router sent prompts"
    with picture(
        stem, title, "seconds since the start", "worker", inches=(INCHES[0], height)
    ) as axes:
        axes.grid(visible=False)
        # Grey, for black-and-white prints.
        strip = axes.imshow(
            rows, aspect="auto", cmap="Greys", interpolation="nearest", norm=PowerNorm(0.5, vmin=0),
            extent=(0, seconds, len(workers) - 0.5, -0.5), gid="strip",
        )  # fmt: skip
        every = -(-len(workers) // MAX_WORKER_NAMES)
        axes.set_yticks(range(0, len(workers), every), workers[::every])
        for edge in range(1, len(workers) if every == 1 else 0):
            axes.axhline(edge - 0.5, color="white", linewidth=2)
        bar = axes.figure.colorbar(strip, ax=axes, label="prompt tokens/s")
        in_full(bar.ax.yaxis)


def sent_to_workers(outcomes: Sequence[Outcome]) -> tuple[list[str], float, list[list[float]]]:
    """Return the workers, the seconds shown, and the prompt tokens per second by time slice."""
    routed = [outcome for outcome in outcomes if outcome.worker]
    workers = sorted({outcome.worker for outcome in routed})
    seconds = max((outcome.sent for outcome in routed), default=0.0) * 1.0001 or 1.0
    width = seconds / BINS
    rows = [[0.0] * BINS for _ in workers]
    for outcome in routed:
        slot = min(BINS - 1, max(0, int(outcome.sent / width)))
        rows[workers.index(outcome.worker)][slot] += outcome.prompt_tokens / width
    return workers, seconds, rows


def _cumulative(events: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return cumulative sums, with about as many steps as a picture can show."""
    steps = [(0.0, 0.0)]
    total = 0.0
    apart = events[-1][0] / 1000 if events else 0.0
    for at, tokens in events:
        total += tokens
        if at - steps[-1][0] >= apart or len(steps) == 1:
            steps.append((at, total))
        else:
            steps[-1] = (steps[-1][0], total)
    if events:
        steps.append((events[-1][0], total))
    return steps

"""The trials, one function each: workers, load and promises."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from rich.table import Table

from benchmarks.policies.promise import Promise
from vllm_sched.bench.compare import report, workloads
from vllm_sched.bench.compare.compare import (
    Comparison,
    ComparisonPlan,
    Contender,
    ProgressReporter,
    contender,
    measure,
    play_round,
    running,
)
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import BACKGROUND, BATCH, LONG, SHORT, Workload
from vllm_sched.bench.results.stats import percentile
from vllm_sched.workers.launch import Side

# Chunk sizes of vLLM's scheduler; the target of `chunk_budget` lies between the first and the last.
FIXED: Final = (128, 256, 512, 1024, 2048)
DEPARTURES: Final = (1, 2, 4, 8, 16)
# Long prompts of the chunk_budget trial, and their interval.
LONGS, LONG_EVERY_S = 6, 1.0


@dataclass(frozen=True)
class Verdict:
    """The results of a trial."""

    table: Table
    promises: Sequence[Promise]
    warning: str
    failed: bool


Trial = Callable[[str, int, int, ProgressReporter], Awaitable[Verdict]]


async def rotation(model: str, rounds: int, seed: int, reporter: ProgressReporter) -> Verdict:
    """Send eight equal prompts at once: all prefills should end at about the same time."""
    plan = ComparisonPlan(model, workloads.equal_prompts(seed=seed), rounds, lone_samples=0)
    sides = [_side("default", plan), _side("rotation", plan)]
    result = await _compared(sides, plan, reporter)
    (lines,) = result.figures.values()
    spread = report.figure(lines, LONG, report.SPREAD).ratio
    makespan = report.figure(lines, "all", "all prompts done").ratio
    return _verdict(
        result,
        Promise("TTFT of the last less that of the first, to the default's", spread, 0.5),
        Promise("until all are done, to the default's", makespan, 1.05),
    )


async def chunk_budget(model: str, rounds: int, seed: int, reporter: ProgressReporter) -> Verdict:
    """Set a target between the decode gaps of small and of large chunks.

    Only gaps during a long prefill count, because all others are within any target.
    """
    workload = _one_by_one(workloads.long_blocks_short(longs=LONGS, seed=seed))
    plan = ComparisonPlan(model, workload, rounds, lone_samples=0)
    fixed = {
        chunk: _side("default", plan, extra=(f"--max-num-batched-tokens={chunk}",), sharing=6)
        for chunk in FIXED
    }
    target_s = await _midway(fixed[FIXED[0]], fixed[FIXED[-1]], plan, reporter)
    ours = _side(
        "chunk_budget",
        plan,
        sets=(f"chunk_budget.itl_ms={target_s * 1000:.0f}",),
        extra=(f"--max-num-batched-tokens={FIXED[-1]}",),
        sharing=6,
    )
    result = await _compared([*fixed.values(), ours], plan, reporter)
    meeting = [
        _mean_ttft(contender)
        for contender in fixed.values()
        if _share_within(contender, target_s) >= 0.99
    ]
    best = min(meeting, default=None)
    ratio = None if best is None else _mean_ttft(ours) / best
    return _verdict(
        result,
        Promise(
            f"share of decode gaps within the target of {target_s * 1000:.0f} ms",
            _share_within(ours, target_s),
            at_least=0.99,
        ),
        Promise("mean TTFT of longs, to the best fixed chunk's within the target", ratio, 1.0),
    )


async def lanes(model: str, rounds: int, seed: int, reporter: ProgressReporter) -> Verdict:
    """Send chats alone, batch alone, and both, to one worker with lanes."""
    both = workloads.chat_beside_batch(seed=seed)
    loads = {"chats alone": SHORT, "batch alone": BATCH, "both": None}
    plans = {
        role: ComparisonPlan(model, _only(both, klass) if klass else both, rounds, lone_samples=0)
        for role, klass in loads.items()
    }
    one = _side("lanes", plans["both"], sharing=1)
    played = {role: Contender(role, role, one.worker) for role in loads}
    async with running([one.worker], reporter):
        for number in range(rounds + 1):
            order = list(played.values())[:: 1 if number % 2 else -1]
            for contender in order:
                reporter.step(f"round {number} of {rounds}, {contender.role}")
                plan = plans[contender.role]
                one_round = await play_round(contender, plan, plan.workload, number, reporter)
                if number:
                    contender.rounds.append(one_round)
    result = Comparison(plans["both"], list(played.values()))
    chats, batch, together = (played[role].rounds for role in loads)
    ttft = report.ratio_of(*(percentile(report.ttfts(r, SHORT), 99) for r in (together, chats)))
    # The strictest target for batch ignores the cost of the chats.
    spans = [_span(played_round, SHORT) for played_round in together]
    beside = [
        _rate_within(played_round, BATCH, span)
        for played_round, span in zip(together, spans, strict=True)
    ]
    alone = [
        _rate_within(played_round, BATCH, span)
        for played_round, span in zip(batch, spans, strict=True)
    ]
    rest = report.ratio_of(_middle(beside), _middle(alone))
    return _verdict(
        result,
        Promise("TTFT p99 of chats beside batch, to that without", ttft, 1.2),
        Promise("batch tokens/s while chats come, to batch alone", rest, at_least=0.8),
    )


async def deferred_prefill(
    model: str, rounds: int, seed: int, reporter: ProgressReporter
) -> Verdict:
    """Keep 32 slots full, and compare auto with fixed thresholds and with the default.

    The best of several noisy figures is biased, so odd rounds select the threshold and even rounds
    compare it. A second worker with auto shows the noise.
    """
    plan = ComparisonPlan(model, workloads.saturated(seed=seed), max(rounds, 2), lone_samples=0)
    count = len(DEPARTURES) + 3
    default = _side("default", plan, sharing=count)
    auto = _side("deferred_prefill", plan, sharing=count)
    again = _side("deferred_prefill", plan, sharing=count, role="auto again")
    fixed = [
        _side(
            "deferred_prefill",
            plan,
            sets=(f"deferred_prefill.departures={departures}",),
            sharing=count,
        )
        for departures in DEPARTURES
    ]
    result = await _compared([default, auto, again, *fixed], plan, reporter)
    ours = _rates(auto)
    ratios = [
        report.ratio_of(_middle(_rates(contender)[::2]), _middle(ours[::2])) for contender in fixed
    ]
    best = max(range(len(fixed)), key=lambda index: ratios[index] or 0.0)
    against = _ratios(ours[1::2], _rates(fixed[best])[1::2])
    return _verdict(
        result,
        Promise(
            f"tokens/s of auto, to K={DEPARTURES[best]}, the best of other rounds",
            _middle(against),
            at_least=0.98,
        ),
        Promise(
            "tokens/s of auto, to the default's",
            _middle(_ratios(ours, _rates(default))),
            at_least=0.98,
        ),
        Promise("the same worker twice, for comparison", _middle(_ratios(ours, _rates(again)))),
    )


TRIALS: Final[Mapping[str, Trial]] = {
    "rotation": rotation,
    "chunk_budget": chunk_budget,
    "lanes": lanes,
    "deferred_prefill": deferred_prefill,
}


def _side(
    name: str,
    plan: ComparisonPlan,
    *,
    sets: Sequence[str] = (),
    extra: Sequence[str] = (),
    sharing: int = 2,
    role: str = "",
) -> Contender:
    side = Side.parse(name, sets=sets, extra=extra)
    return contender(role or side.label, side, plan, sharing=sharing)


async def _compared(
    sides: Sequence[Contender], plan: ComparisonPlan, reporter: ProgressReporter
) -> Comparison:
    """Start all workers and measure them in turns."""
    async with running([side.worker for side in sides], reporter):
        await measure(sides, plan, reporter)
    return Comparison(plan, sides)


async def _midway(
    small: Contender, large: Contender, plan: ComparisonPlan, reporter: ProgressReporter
) -> float:
    """Return the mean of two fixed chunk sizes' p99 gaps."""
    once = ComparisonPlan(plan.model, plan.workload, 1, lone_samples=0)
    ends = [
        Contender(contender.role, contender.label, contender.worker) for contender in (small, large)
    ]
    async with running([end.worker for end in ends], reporter):
        await measure(ends, once, reporter)
    return fmean(percentile(report.itls(e.rounds, BACKGROUND), 99) or 0.0 for e in ends)


def _only(workload: Workload, klass: str) -> Workload:
    arrivals = tuple(arrival for arrival in workload.arrivals if arrival.klass == klass)
    return replace(workload, arrivals=arrivals)


def _one_by_one(workload: Workload) -> Workload:
    """Return the workload with its long prompts LONG_EVERY_S apart."""
    longs = itertools.count()
    arrivals = tuple(
        replace(arrival, at=next(longs) * LONG_EVERY_S) if arrival.klass == LONG else arrival
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals)


def _share_within(contender: Contender, target_s: float) -> float:
    gaps = [gap for played in contender.rounds for gap in _gaps_beside(played)]
    return sum(gap <= target_s for gap in gaps) / len(gaps)


def _gaps_beside(played: Round) -> list[float]:
    """Return the background's gaps during a long prefill."""
    prefills = [(r.sent, r.first_token) for r in played.records if r.klass == LONG]
    return [
        later - sooner
        for record in played.records
        if record.klass == BACKGROUND
        for sooner, later in itertools.pairwise(record.ticks)
        if any(sent < later and (first is None or sooner < first) for sent, first in prefills)
    ]


def _mean_ttft(contender: Contender) -> float:
    return fmean(report.ttfts(contender.rounds, LONG))


def _span(played: Round, klass: str) -> tuple[float, float]:
    """Return when the first request of a class was sent, and when the last one ended."""
    records = [r for r in played.records if r.klass == klass]
    return min(r.sent for r in records), max(r.end for r in records)


def _rate_within(played: Round, klass: str, span: tuple[float, float]) -> float | None:
    """Return a class's tokens per second in a span; prompts count with their first tokens."""
    since, until = span
    records = [r for r in played.records if r.klass == klass and r.first_token is not None]
    until = min(until, max((r.ticks[0] for r in records), default=0.0))  # no tail
    if until <= since:
        return None
    done = sum(sum(since < tick <= until for tick in r.ticks) for r in records)
    done += sum(r.prompt_tokens for r in records if since < r.ticks[0] <= until)
    return done / (until - since)


def _rates(contender: Contender) -> list[float | None]:
    return [report.backlogged_rate(played, BATCH) for played in contender.rounds]


def _ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    return [report.ratio_of(one, other) for one, other in zip(ours, theirs, strict=True)]


def _middle(values: Sequence[float | None]) -> float | None:
    return percentile([value for value in values if value is not None], 50)


def _verdict(result: Comparison, *promises: Promise) -> Verdict:
    return Verdict(result.table(), promises, result.warning(), result.failed)

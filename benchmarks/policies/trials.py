"""The trials: which workers, which load, and what follows from the rounds. One function each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from rich.table import Table

from benchmarks.policies.promise import Promise
from vllm_sched.bench import report, workloads
from vllm_sched.bench.compare import (
    Contender,
    Narrator,
    Plan,
    contender,
    measure,
    play_round,
    running,
)
from vllm_sched.bench.contest import Contest
from vllm_sched.bench.workloads import BACKGROUND, BATCH, LONG, SHORT, Workload
from vllm_sched.workers.launch import Side

# Chunks of vLLM's own scheduler, between whose outer two the target of `chunk_budget` lies.
FIXED: Final = (128, 256, 512, 1024, 2048)
DEPARTURES: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Verdict:
    """What a trial found."""

    table: Table
    promises: Sequence[Promise]
    warning: str
    failed: bool


Trial = Callable[[str, int, int, Narrator], Awaitable[Verdict]]


async def rotation(model: str, rounds: int, seed: int, narrator: Narrator) -> Verdict:
    """Let eight equal prompts come together: all are to be read at about the same time."""
    plan = Plan(model, workloads.equal_prompts(seed=seed), rounds, lone_samples=0)
    sides = [_side("default", plan), _side("rotation", plan)]
    contest = await _contest(sides, plan, narrator)
    lines = contest.pairs[0].figures
    spread = report.figure(lines, LONG, report.SPREAD).ratio
    makespan = report.figure(lines, "all", "all prompts done").ratio
    return _verdict(
        contest,
        Promise("TTFT of the last less that of the first, to the default's", spread, 0.5),
        Promise("until all are done, to the default's", makespan, 1.05),
    )


async def chunk_budget(model: str, rounds: int, seed: int, narrator: Narrator) -> Verdict:
    """Set a target between what small and large chunks do to the gaps of running decodes."""
    plan = Plan(model, workloads.long_blocks_short(seed=seed), rounds, lone_samples=0)
    fixed = {
        chunk: _side("default", plan, extra=(f"--max-num-batched-tokens={chunk}",), sharing=6)
        for chunk in FIXED
    }
    target_s = await _midway(fixed[FIXED[0]], fixed[FIXED[-1]], plan, narrator)
    ours = _side(
        "chunk_budget",
        plan,
        sets=(f"chunk_budget.itl_ms={target_s * 1000:.0f}",),
        extra=(f"--max-num-batched-tokens={FIXED[-1]}",),
        sharing=6,
    )
    contest = await _contest([*fixed.values(), ours], plan, narrator)
    meeting = [_mean_ttft(each) for each in fixed.values() if _share_within(each, target_s) >= 0.99]
    best = min(meeting, default=None)
    ratio = None if best is None else _mean_ttft(ours) / best
    return _verdict(
        contest,
        Promise(
            f"share of decode gaps within the target of {target_s * 1000:.0f} ms",
            _share_within(ours, target_s),
            at_least=0.99,
        ),
        Promise("mean TTFT of longs, to the best fixed chunk's within the target", ratio, 1.0),
    )


async def lanes(model: str, rounds: int, seed: int, narrator: Narrator) -> Verdict:
    """Let chats come alone, batch alone, and both, to one worker with lanes."""
    both = workloads.chat_beside_batch(seed=seed)
    loads = {"chats alone": SHORT, "batch alone": BATCH, "both": None}
    plans = {
        role: Plan(model, _only(both, klass) if klass else both, rounds, lone_samples=0)
        for role, klass in loads.items()
    }
    one = _side("lanes", plans["both"], sharing=1)
    played = {role: Contender(role, role, one.worker) for role in loads}
    async with running([one.worker], narrator):
        for number in range(rounds + 1):
            order = list(played.values())[:: 1 if number % 2 else -1]
            for each in order:
                narrator.step(f"round {number} of {rounds}, {each.role}")
                plan = plans[each.role]
                load = plan.workload if number else plan.workload.shrunk()
                found = await play_round(each, plan, load, number, narrator)
                if number:
                    each.rounds.append(found)
    contest = Contest(plans["both"], list(played.values()))
    chats, batch, together = (played[role].rounds for role in loads)
    ttft = report.ratio_of(
        *(report.percentile(report.ttfts(r, SHORT), 99) for r in (together, chats))
    )
    # What chats leave over: of the time in which both are about, that in which none is served.
    busy = [
        sum(r.end - r.sent for r in each.records) / report.foreground_end(each) for each in chats
    ]
    alone, beside = (_backlogged(r) for r in (batch, together))
    rest = report.ratio_of(beside, None if alone is None else alone * (1 - fmean(busy)))
    return _verdict(
        contest,
        Promise("TTFT p99 of chats beside batch, to that without", ttft, 1.2),
        Promise("batch tokens/s, to what chats leave over", rest, at_least=0.8),
    )


async def deferred_prefill(model: str, rounds: int, seed: int, narrator: Narrator) -> Verdict:
    """Keep 32 slots full: auto against every fixed threshold, and against none."""
    plan = Plan(model, workloads.saturated(seed=seed), rounds, lone_samples=0)
    count = len(DEPARTURES) + 2
    default = _side("default", plan, sharing=count)
    auto = _side("deferred_prefill", plan, sharing=count)
    fixed = [
        _side(
            "deferred_prefill",
            plan,
            sets=(f"deferred_prefill.departures={departures}",),
            sharing=count,
        )
        for departures in DEPARTURES
    ]
    contest = await _contest([default, auto, *fixed], plan, narrator)
    ours, *theirs = (report.figure(pair.figures, BATCH, "tokens/s").ratio for pair in contest.pairs)
    best = max(ratio for ratio in theirs if ratio is not None)
    return _verdict(
        contest,
        Promise("tokens/s of auto, to the best fixed", report.ratio_of(ours, best), at_least=0.98),
        Promise("tokens/s of auto, to the default's", ours, at_least=0.98),
    )


TRIALS: Final[Mapping[str, Trial]] = {
    "rotation": rotation,
    "chunk_budget": chunk_budget,
    "lanes": lanes,
    "deferred_prefill": deferred_prefill,
}


def _side(
    name: str,
    plan: Plan,
    *,
    sets: Sequence[str] = (),
    extra: Sequence[str] = (),
    sharing: int = 2,
) -> Contender:
    side = Side.parse(name, sets=sets, extra=extra)
    return contender(side.label, side, plan, sharing=sharing)


async def _contest(sides: Sequence[Contender], plan: Plan, narrator: Narrator) -> Contest:
    """Start all, and measure them in turns."""
    async with running([each.worker for each in sides], narrator):
        await measure(sides, plan, narrator)
    return Contest(plan, sides)


async def _midway(small: Contender, large: Contender, plan: Plan, narrator: Narrator) -> float:
    """Tell the gap that lies between two fixed chunks' p99."""
    once = Plan(plan.model, plan.workload, 1, lone_samples=0)
    ends = [Contender(each.role, each.label, each.worker) for each in (small, large)]
    async with running([each.worker for each in ends], narrator):
        await measure(ends, once, narrator)
    return fmean(report.percentile(report.itls(e.rounds, BACKGROUND), 99) or 0.0 for e in ends)


def _only(workload: Workload, klass: str) -> Workload:
    arrivals = tuple(each for each in workload.arrivals if each.klass == klass)
    return replace(workload, arrivals=arrivals)


def _share_within(each: Contender, target_s: float) -> float:
    gaps = report.itls(each.rounds, BACKGROUND)
    return sum(gap <= target_s for gap in gaps) / len(gaps)


def _mean_ttft(each: Contender) -> float:
    return fmean(report.ttfts(each.rounds, LONG))


def _backlogged(rounds: Sequence[report.Round]) -> float | None:
    rates = [report.backlogged_rate(each, BATCH) for each in rounds]
    return report.percentile([rate for rate in rates if rate is not None], 50)


def _verdict(contest: Contest, *promises: Promise) -> Verdict:
    return Verdict(contest.table(), promises, contest.warning(), contest.failed)

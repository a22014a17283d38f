"""Which machines to plan with, of profiles that differ in tensor parallelism and precision.

Each machine gets a coarse rate from a few short runs: one pool, and prefill and decode pools. Of
the best precision, pairs of machines are tried too, one for prefill and one for decode workers. The
best are then planned in full.

How it fails: a machine that is good only with pools for short and long prompts may be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from vllm_sched.bench.traffic.schedule import MAX_REQUESTS
from vllm_sched.cost.profiles import QUANTIZED
from vllm_sched.errors import UsageError
from vllm_sched.sim.planning.fleet_shapes import ONE_POOL, PREFILL_DECODE
from vllm_sched.sim.planning.progress import PlanProgress
from vllm_sched.sim.planning.question import QUICK_EFFORT, PlanQuestion
from vllm_sched.sim.planning.search import FleetSearch
from vllm_sched.sim.planning.trials import IDLE_LOAD
from vllm_sched.sim.types import WorkerModel

COARSE_FAMILIES: Final = (ONE_POOL, PREFILL_DECODE)
CLOSE: Final = 0.85  # of the best coarse rate, to be planned in full
MAX_PLANNED: Final = 2
GROWTH: Final = 1.5  # of a size that is too small


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine for all workers, or a pair of machines, with its coarse result."""

    question: PlanQuestion
    result: float = 0.0  # requests/s, or GPUs
    why: str = ""  # why it serves nothing


def compare_machines(
    question: PlanQuestion,
    machines: Sequence[WorkerModel],
    coarse: Callable[[FleetSearch, float], float],
    best_of: Callable[[Sequence[Candidate]], list[Candidate]],
    progress: PlanProgress,
) -> list[Candidate]:
    """Return every machine with its result by `coarse`, and pairs of the best precision.

    `coarse` gets the best machine's result for a pair, and 0 before. It may raise a `UsageError`
    for a machine that can't serve the traffic.
    """
    candidates: list[Candidate] = []
    with progress.part(0.0, 0.5):
        for machine in progress.each(machines):
            progress.note(machine.profile)
            candidates.append(_compare(replace(question, machine=machine), coarse, 0.0))
    if PREFILL_DECODE not in question.families or not (best := best_of(candidates)):
        return candidates
    wanted = precision(best[0].question.machine)
    able = [candidate.question.machine for candidate in _able(candidates)]
    alike = [machine for machine in able if precision(machine) == wanted]
    pairs = [pair for pair in product(alike, repeat=2) if pair[0].gpus != pair[1].gpus]
    with progress.part(0.5, 1.0):
        for prefill, decode in progress.each(pairs):
            pair = replace(
                question, machine=decode, prefill_machine=prefill, families=(PREFILL_DECODE,)
            )
            progress.note(pair.profiles)
            candidates.append(_compare(pair, coarse, best[0].result))
    return candidates


def _compare(
    question: PlanQuestion, coarse: Callable[[FleetSearch, float], float], best_rate: float
) -> Candidate:
    families = tuple(family for family in question.families if family in COARSE_FAMILIES)
    rough = replace(
        question,
        effort=question.effort * QUICK_EFFORT,
        policies=question.policies[-1:],
        families=families or question.families,
        draws=1,
    )
    try:
        search = FleetSearch(rough)
        search.check()
        return Candidate(question, coarse(search, best_rate))
    except UsageError as error:
        return Candidate(question, why=str(error))


def rate_on(gpus: int) -> Callable[[FleetSearch, float], float]:
    """Return a function for the coarse rate on a number of GPUs, if it is close to a known one."""

    def rate(search: FleetSearch, best_rate: float) -> float:
        rough = [
            served.rate
            for family in search.question.families
            for served in search.rough_rates(family, gpus, CLOSE * best_rate)
        ]
        if not rough:
            limit = f"less than {CLOSE * best_rate:.3g} requests/s" if best_rate else "no rate"
            raise UsageError(f"it serves {limit} in time")
        return max(rough)

    return rate


def highest(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates to plan in full, by rate."""
    able = sorted(_able(candidates), key=lambda candidate: -candidate.result)
    close = [candidate for candidate in able if candidate.result >= CLOSE * able[0].result]
    return close[:MAX_PLANNED]


def fewest(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates to plan in full, by the number of GPUs."""
    able = sorted(_able(candidates), key=lambda candidate: candidate.result)
    close = [candidate for candidate in able if CLOSE * candidate.result <= able[0].result]
    return close[:MAX_PLANNED]


def _able(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if not candidate.why]


def precision(machine: WorkerModel) -> tuple[int, int, bool]:
    """Return what machines that exchange KV blocks have in common."""
    return machine.kv_token_bytes, machine.kv_pieces, QUANTIZED in machine.flags


def fewest_gpus(search: FleetSearch, start: float = 0, *, rate: float) -> int:
    """Return the number of GPUs; the search begins at `start`, or at the compute bound."""
    if (count := search.trials.count(rate, fine=True)) > MAX_REQUESTS:
        raise UsageError(
            f"--request-rate {rate:g}: one simulation would have {count:,} requests, at most "
            f"{MAX_REQUESTS:,} are possible; give a lower rate, and deploy that fleet several times"
        )
    unit = min(machine.gpus for machine in search.question.machines if machine)
    bound = max(math.ceil(rate / search.trials.traffic.max_worker_rate), 1)
    max_workers = math.ceil(rate / (search.trials.worker_rate * IDLE_LOAD)) + bound
    too_few, enough = bound - 1, max(bound, int(start) // unit)
    while search.serving(enough * unit, rate) is None:
        if enough > max_workers:
            raise UsageError(
                f"--request-rate {rate:g}: {enough * unit:,} GPUs of {search.question.profiles} "
                "do not serve it; give looser targets"
            )
        too_few, enough = enough, max(math.ceil(GROWTH * enough), enough + 1)
    while enough - too_few > 1:
        # The compute bound may be far too low: stay near the size that serves.
        middle = min(max((too_few + enough) // 2, math.ceil(enough / GROWTH)), enough - 1)
        if search.serving(middle * unit, rate) is None:
            too_few = middle
        else:
            enough = middle
    return enough * unit

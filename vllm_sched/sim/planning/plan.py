"""Plan a fleet for a traffic, targets, and a number of GPUs or a rate.

The search uses fluid engines (`search`). With vLLM installed, the best fleets may be played again
and ranked with real schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from vllm_sched.bench.calibrate.aiconfigurator import named_by
from vllm_sched.bench.compare.report import format_count
from vllm_sched.bench.traffic.schedule import MAX_REQUESTS
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.exact_engine import require_vllm
from vllm_sched.sim.fleet.models import AS_MEASURED, AssumedWorker, of_profile
from vllm_sched.sim.planning.capacity_bound import Capacity
from vllm_sched.sim.planning.exact_check import ExactProof, rank_exactly
from vllm_sched.sim.planning.machine_choice import (
    Candidate,
    compare_machines,
    fewest,
    fewest_gpus,
    highest,
    rate_on,
)
from vllm_sched.sim.planning.progress import PlanProgress, Tell
from vllm_sched.sim.planning.question import PlanQuestion
from vllm_sched.sim.planning.search import FleetSearch, ServedRate
from vllm_sched.sim.types import WorkerModel

# Progress after each part of a plan.
COMPARED, SIZED = 0.3, 0.5
SEARCH_DONE, EXACT_DONE, MORE_DONE, FEWER_DONE = 0.7, 0.8, 0.9, 0.95
FRONTIER: Final = (0.25, 0.5, 0.75)  # sizes, of the best fleet's


@dataclass(frozen=True, slots=True)
class FleetPlan:
    question: PlanQuestion
    gpus: int
    ranking: list[ServedRate]  # the best of each family, best first
    more: ServedRate | None  # with one more worker; None if it serves no more
    fewer: ServedRate | None  # with one worker fewer; None if there is no such fleet
    smaller: list[ServedRate]  # fleets of the same kind, much smaller
    candidates: list[Candidate]  # the machines that were compared, if several were named
    capacity: Capacity
    prompt: float  # mean tokens
    output: float  # mean tokens
    runs: int
    requests: int  # per draw
    exact: dict[str, ExactProof]  # by shape
    is_exact: bool = False  # rates are from real schedulers
    stopped_at: float | None = None  # progress at which the user stopped the search
    by_gpus: bool = False  # the candidates' results are numbers of GPUs, not rates

    @property
    def best(self) -> ServedRate:
        return self.ranking[0]

    @property
    def frontier(self) -> list[tuple[int, ServedRate]]:
        """Fleets of several sizes with their numbers of GPUs, the smallest first."""
        fleets = [*self.smaller, self.fewer, self.best, self.more]
        sized = [(self.gpus_of(served), served) for served in fleets if served is not None]
        return sorted(sized, key=lambda pair: pair[0])

    @property
    def prefill_bytes_per_s(self) -> float:
        """Bytes/s of hand-overs at the best rate, if every prompt is handed over."""
        return self.best.rate * self.prompt * self.question.machine.kv_token_bytes

    def gpus_of(self, served: ServedRate) -> int:
        return served.shape.gpus(*self.question.machines)


def machines_of(profiles: Sequence[str], assumed: AssumedWorker = AS_MEASURED) -> list[WorkerModel]:
    """Return the machines of profiles; `model=M,system=S` names one for each tp and dtype."""
    names = dict.fromkeys(name for profile in profiles for name in named_by(profile))
    return [assumed.apply_to(of_profile(name)) for name in names]


@dataclass(slots=True)
class _MachinePlan:
    """The search for the best fleet of one kind of machine, and its results."""

    search: FleetSearch
    fluid_ranking: list[ServedRate] = field(default_factory=list)  # ranking by fluid engines
    exact_ranking: list[ServedRate] = field(default_factory=list)  # ranking by real schedulers
    proofs: dict[str, ExactProof] = field(default_factory=dict)
    more: ServedRate | None = None
    fewer: ServedRate | None = None
    smaller: list[ServedRate] = field(default_factory=list)

    @property
    def ranking(self) -> list[ServedRate]:
        return self.exact_ranking or self.fluid_ranking

    @property
    def best_by_fluid(self) -> ServedRate:
        """The best fleet, with its rate by fluid engines."""
        best = self.ranking[0]
        rate = next(served.rate for served in self.fluid_ranking if served.shape == best.shape)
        return replace(best, rate=rate)

    @property
    def best_rate(self) -> float:
        return self.best_by_fluid.rate if self.fluid_ranking else 0.0

    def find_best(self, gpus: int, floor: float = 0.0) -> None:
        """Find the best fleets above `floor`; after Ctrl-C those so far."""
        search = self.search
        question = search.question
        _check_size(search, gpus)
        try:
            search.progress.note("an idle worker")
            search.check()
            self.fluid_ranking = search.best(gpus, floor)
        except KeyboardInterrupt:
            self.fluid_ranking = search.best_so_far(gpus)
            raise
        if not self.fluid_ranking and not floor:
            raise UsageError(
                f"--goodput: no fleet of {gpus // question.machine.gpus} {question.profiles} "
                f"serves {question.source.name} at any rate; give looser targets"
            )

    def rank_exactly(self) -> None:
        self.exact_ranking = rank_exactly(self.search, self.fluid_ranking, self.proofs)

    def find_other_sizes(self) -> None:
        search, best, progress = self.search, self.best_by_fluid, self.search.progress
        workers = best.shape.workers
        with progress.part(EXACT_DONE if self.exact_ranking else SEARCH_DONE, MORE_DONE):
            self.more = search.with_one_more(best)
        with progress.part(MORE_DONE, FEWER_DONE):
            self.fewer = search.with_one_fewer(best)
        sizes = {round(share * workers) for share in FRONTIER} - {0, workers - 1, workers}
        with progress.part(FEWER_DONE, 1.0):
            for size in progress.each(sorted(sizes)):
                progress.note(format_count(size, "worker"))
                if (served := search.at_size(best, size - workers)) is not None:
                    self.smaller.append(served)


def plan(
    question: PlanQuestion,
    gpus: int | None = None,
    *,
    machines: Sequence[WorkerModel] = (),
    rate: float = 0.0,
    exact: bool = False,
    tell: Tell | None = None,
) -> FleetPlan:
    """Return the best fleet, or raise a `UsageError`.

    It has `gpus` GPUs, or as few as serve `rate`. Of several machines the best is taken. Ctrl-C
    returns the best fleet so far, if there is one.
    """
    progress = PlanProgress(tell)
    if exact:
        require_vllm("--exact", "leave --exact out")
    if gpus is not None:
        machines = _fitting_machines(machines or [question.machine], gpus)
    compared = COMPARED if len(machines) > 1 else 0.0
    with progress.part(0.0, compared):
        candidates, chosen = _choose(question, machines, gpus, rate, progress)
    if by_gpus := gpus is None:
        with progress.part(compared, SIZED):
            chosen, gpus = _smallest(chosen, rate, progress)
    plans: list[_MachinePlan] = []
    stopped_at: float | None = None
    try:
        with progress.part(SIZED if by_gpus else compared, SEARCH_DONE):
            for candidate in progress.each(chosen):
                floor = max((earlier.best_rate for earlier in plans), default=0.0)
                plans.append(_MachinePlan(FleetSearch(candidate.question, progress)))
                plans[-1].find_best(gpus, floor)
            best = _best_of(plans)
            while by_gpus and best.best_rate < rate:
                gpus += best.search.question.machine.gpus  # not all that serve it were judged
                best.find_best(gpus)
        _check_rate(rate, best, gpus)
        if exact:
            with progress.part(SEARCH_DONE, EXACT_DONE):
                best.rank_exactly()
        best.find_other_sizes()
        with progress.part(1.0, 1.0):
            progress.note("done")
    except KeyboardInterrupt:
        if not any(machine_plan.fluid_ranking for machine_plan in plans):
            raise
        stopped_at = progress.done
    return replace(_plan_of(_best_of(plans), gpus, candidates, stopped_at), by_gpus=by_gpus)


def _best_of(plans: Sequence[_MachinePlan]) -> _MachinePlan:
    return max(plans, key=lambda plan: plan.best_rate)


def _plan_of(
    machine_plan: _MachinePlan, gpus: int, candidates: list[Candidate], stopped_at: float | None
) -> FleetPlan:
    search, best = machine_plan.search, machine_plan.best_by_fluid
    # These rates are from fluid engines: scale them like the best fleet's rate.
    scale = machine_plan.ranking[0].rate / best.rate
    more, fewer, *smaller = (
        served and replace(served, rate=served.rate * scale)
        for served in (machine_plan.more, machine_plan.fewer, *machine_plan.smaller)
    )
    traffic = search.trials.traffic
    capacity = Capacity.from_model(search.question.machine, traffic.prompt, traffic.output)
    return FleetPlan(
        search.question,
        gpus,
        ranking=machine_plan.ranking,
        more=more,
        fewer=fewer,
        smaller=[served for served in smaller if served is not None],
        candidates=candidates,
        capacity=replace(capacity, requests_per_s=traffic.max_worker_rate),
        prompt=traffic.prompt,
        output=traffic.output,
        runs=search.runs,
        requests=search.trials.count(best.rate, fine=True),
        exact=machine_plan.proofs,
        is_exact=bool(machine_plan.exact_ranking),
        stopped_at=stopped_at,
    )


# Machines and sizes


def _choose(
    question: PlanQuestion,
    machines: Sequence[WorkerModel],
    gpus: int | None,
    rate: float,
    progress: PlanProgress,
) -> tuple[list[Candidate], list[Candidate]]:
    """Return all machines as candidates, if there are several, and those to plan in full."""
    if len(machines) < 2:
        machine = machines[0] if machines else question.machine
        return [], [Candidate(replace(question, machine=machine))]
    if gpus is not None:
        coarse, best_of = rate_on(gpus), highest
    else:
        coarse, best_of = partial(fewest_gpus, rate=rate), fewest
    candidates = compare_machines(question, machines, coarse, best_of, progress)
    chosen = best_of(candidates)
    if not chosen:
        reasons = "\n".join(
            f"  {candidate.question.profiles}: {candidate.why}" for candidate in candidates
        )
        raise UsageError(f"no machine can serve this traffic:\n{reasons}")
    return candidates, chosen


def _smallest(
    chosen: Sequence[Candidate], rate: float, progress: PlanProgress
) -> tuple[list[Candidate], int]:
    """Return the machine that needs the fewest GPUs for a rate, and their number."""
    sized: list[tuple[int, Candidate]] = []
    for candidate in progress.each(chosen):
        search = FleetSearch(candidate.question, progress)
        progress.note("an idle worker")
        search.check()
        sized.append((fewest_gpus(search, candidate.result, rate=rate), candidate))
    gpus, best = min(sized, key=lambda pair: pair[0])
    return [best], gpus


def _fitting_machines(machines: Sequence[WorkerModel], gpus: int) -> list[WorkerModel]:
    fitting = [machine for machine in machines if machine.gpus <= gpus]
    if not fitting:
        min_gpus = min(machine.gpus for machine in machines)
        names = ", ".join(machine.profile for machine in machines)
        raise UsageError(
            f"--gpus {gpus}: a worker of {names} takes {min_gpus}; give {min_gpus} or more, or "
            "another --profile"
        )
    return fitting


def _check_size(search: FleetSearch, gpus: int) -> None:
    """Refuse a fleet that is too large to simulate, before the search starts."""
    worker_gpus = search.question.machine.gpus
    largest = gpus // worker_gpus + 1  # the plan includes one more worker
    max_rate = largest * search.trials.traffic.max_worker_rate
    if math.isinf(max_rate) or (count := search.trials.count(max_rate, fine=True)) <= MAX_REQUESTS:
        return
    fits = (largest * MAX_REQUESTS // count - 1) * worker_gpus
    remedy = (
        f"plan for {fits:,} at most, and deploy that fleet several times"
        if fits >= worker_gpus
        else "give a shorter --goodput ttft"
    )
    raise UsageError(
        f"--gpus {gpus}: one simulation of these GPUs and one more worker would have "
        f"{count:,} requests, at most {MAX_REQUESTS:,} are possible; {remedy}"
    )


def _check_rate(rate: float, machine_plan: _MachinePlan, gpus: int) -> None:
    best, question = machine_plan.best_by_fluid, machine_plan.search.question
    if best.rate >= rate:
        return
    # Linear: larger fleets are at least as efficient.
    wanted = int(-(-best.shape.workers * rate // best.rate)) * question.machine.gpus
    raise UsageError(
        f"--request-rate {rate:g}: {format_count(gpus, 'GPU')} of {question.profiles} can serve "
        f"{best.rate:.3g} requests/s ({best.shape}); give about --gpus {wanted}, looser targets, "
        "or no rate to see that plan; --min-gpus finds the number"
    )

"""The best fleets of a plan, played again with vLLM's own schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.fleet.figures import FlowFigures, FlowResult
from vllm_sched.sim.planning.fleet_shapes import FleetShape
from vllm_sched.sim.planning.search import FleetSearch, ServedRate, rank_fleets
from vllm_sched.sim.planning.trials import WARM_SHARE, longest_kept

EXACT_REQUESTS, MAX_EXACT_REQUESTS, EXACT_DURATION_S = 300, 1500, 30.0
EXACT_TRIES, EXACT_STEP = 5, 0.85


class ExactProof(NamedTuple):
    rate: float
    share: float  # in time
    longest: float  # share of the longest prompts, in time or tolerably late
    requests: int


def rank_exactly(
    search: FleetSearch, ranking: list[ServedRate], played: dict[str, ExactProof]
) -> list[ServedRate]:
    exact_ranking: list[ServedRate] = []
    for served in search.progress.each(ranking):
        search.progress.note(f"exactly: {served.shape}")
        rate = served.rate
        run = play_exactly(search, served.shape, rate)
        for _ in range(EXACT_TRIES - 1):
            if search.trials.is_good_enough(run, brief=True):
                break
            rate *= EXACT_STEP
            run = play_exactly(search, served.shape, rate)
        proof = ExactProof(rate, run.all.share, longest_kept(run), run.all.arrived)
        played[str(served.shape)] = proof
        if search.trials.is_good_enough(run, brief=True):
            exact_ranking.append(ServedRate(served.shape, rate, run))
    if not exact_ranking:
        lowest = ", ".join(
            f"{proof.rate:.3g} ({proof.share:.0%}, {proof.longest:.0%})"
            for proof in played.values()
        )
        raise UsageError(
            f"--exact: with vLLM's own schedulers none of the best fleets has "
            f"{search.question.share:.0%} of all and of the longest requests in time, at {lowest} "
            "requests/s; give looser targets, or leave --exact out"
        )
    return rank_fleets(exact_ranking)


def play_exactly(search: FleetSearch, shape: FleetShape, rate: float) -> FlowResult:
    """Play a fleet with real schedulers and a draw that the search has not used."""
    from proxy.config import FleetConfig
    from vllm_sched.sim.engines.exact_engine import ExactEngine
    from vllm_sched.sim.fleet.fleet import SimulatedFleet

    question = search.question
    config = FleetConfig(**shape.to_fleet("model", *question.machines))
    models = {worker.model.name: worker.model for worker in shape.place_workers(*question.machines)}
    fleet = SimulatedFleet(config, models, ExactEngine)
    count = min(max(round(rate * EXACT_DURATION_S), EXACT_REQUESTS), MAX_EXACT_REQUESTS)

    def told(_now: float, _sent: int, done: int) -> None:
        search.progress.note(f"exactly: {shape} at {rate:.3g}/s: {done:,} of {count:,} requests")

    told(0.0, 0, 0)
    played = fleet.play(question.schedule(rate, count, question.draws + 1), told)
    return count_outcomes(search, played.outcomes, played.duration)


def count_outcomes(
    search: FleetSearch, outcomes: Sequence[Outcome], duration_s: float
) -> FlowResult:
    trials, gaps = search.trials, QuantileSketch()
    figures = FlowFigures(search.question.targets, trials.tolerated_ttft_s)
    span = max((outcome.at for outcome in outcomes), default=0.0)
    for outcome in outcomes:
        klass, itls = trials.class_of(outcome.prompt_tokens), outcome.itls
        figures.record_arrival(klass)
        figures.record_end(outcome, klass, max(itls, default=0.0))
        if not outcome.good:
            continue
        for gap in itls:
            gaps.add(gap)
        if outcome.at >= WARM_SHARE * span:
            figures.trend.add(outcome.at, outcome.ttft)
    return figures.result(span, duration_s, gaps)

"""The best fleet for a traffic, by simulation.

Fleets are compared by the highest rate at which a share of the requests (90 %, as in `sweep`) is in
time. One draw of the requests brackets a rough rate; a fleet far below the best is dropped after
one run. Other draws judge the finalists (`capacity_search`). Among equal rates (within
`EQUAL_RATE_SHARE`) the earlier family and fewer policies win.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

from vllm_sched.sim.fleet.figures import FlowResult
from vllm_sched.sim.planning import capacity_bound
from vllm_sched.sim.planning.capacity_search import CapacitySearch
from vllm_sched.sim.planning.fleet_shapes import (
    FAMILIES,
    ONE_POOL,
    POLICIES,
    SHORT_APART,
    FleetShape,
    SplitHints,
    shapes,
)
from vllm_sched.sim.planning.progress import PlanProgress
from vllm_sched.sim.planning.question import FEW_DRAWS, QUICK_EFFORT, PlanQuestion
from vllm_sched.sim.planning.trials import IDLE_LOAD, FleetTrials, TrafficStats, check_feasible

EQUAL_RATE_SHARE: Final = 0.04  # rates this close are equal
MAX_ROUGH_RATIO: Final = 1.12  # ratio of the two sides of a rough rate
MAX_FINALISTS: Final = 3  # per family, plus the best of each policy that is close
BOUNDARY_QUANTILES: Final = (0.5, 0.75, 0.9, 0.97)
MAX_ROUGH_RUNS: Final = 24
WIDE_STEP: Final = 1.6  # ratio of two rough rates after a guess


@dataclass(frozen=True, slots=True)
class ServedRate:
    shape: FleetShape
    rate: float
    run: FlowResult  # at that rate, all draws together
    shares: tuple[float, ...] = ()  # in time, by draw

    @property
    def spread(self) -> tuple[float, float]:
        shares = self.shares or (self.run.all.share,)
        return min(shares), max(shares)

    def likely_with(self, change: int) -> float:
        """Return the rate with `change` more workers, if it grows with their number."""
        return self.rate * (1 + change / self.shape.workers)


class FleetSearch:
    def __init__(self, question: PlanQuestion, progress: PlanProgress | None = None) -> None:
        self.question = question
        self.progress = progress or PlanProgress()
        self.trials = FleetTrials(question, self.progress.note)
        self._best_rough_rates: defaultdict[int, float] = defaultdict(float)  # by number of GPUs
        self._judged: list[ServedRate] = []

    @cached_property
    def _judge(self) -> CapacitySearch:
        trials = self.trials
        play = partial(trials.serves, fine=True)
        return CapacitySearch(trials.judging_draws(), play, trials.is_good_enough)

    @property
    def runs(self) -> int:
        quick = vars(self).get("_quick")
        return self.trials.runs + (quick.trials.runs if quick else 0)

    def rough_rate(
        self, shape: FleetShape, start: float, *, min_rate: float = 0.0, step: float = WIDE_STEP
    ) -> ServedRate | None:
        """Return the rough rate by one draw, up to the compute bound; None if below `min_rate`.

        `step` is the ratio of rates until one is too high.
        """
        max_rate = self._rate_bound(shape)
        if min_rate > max_rate:
            return None
        best: FlowResult | None = None
        low, high = 0.0, math.inf
        rate = min(max(start, min_rate), max_rate)
        for _ in range(MAX_ROUGH_RUNS):
            if (run := self.trials.serves(shape, rate)) is not None:
                best, low = run, rate
                if high < math.inf or rate >= max_rate:
                    break
                rate = min(step * rate, max_rate)
            else:
                high = rate
                if rate <= min_rate or low:
                    break
                rate = max(rate / step, min_rate)
        if best is None:
            return None
        while high / low > MAX_ROUGH_RATIO and high < math.inf:
            rate = math.sqrt(low * high)
            if (run := self.trials.serves(shape, rate)) is not None:
                best, low = run, rate
            else:
                high = rate
        return ServedRate(shape, low, best)

    def judge(
        self, shape: FleetShape, start: float, *,
        min_rate: float = 0.0, max_rate: float = math.inf, draws: int | None = None,
    ) -> ServedRate | None:  # fmt: skip
        """Return the rate by the hardest `draws`, or by all; None if below `min_rate`."""
        max_rate = min(max_rate, self._rate_bound(shape))
        if min_rate > max_rate:
            return None
        # If an idle worker misses the targets, so does every lower rate.
        min_rate = max(min_rate, min(self.trials.worker_rate, start) * IDLE_LOAD)
        verdict = self._judge.highest(
            shape, start, min_rate=min_rate, max_rate=max_rate, draws=draws
        )
        if verdict is None:
            return None
        shares = tuple(run.all.share for run in verdict.runs)
        served = ServedRate(shape, verdict.rate, verdict.run, shares)
        if draws is None:
            self._judged.append(served)
        return served

    def _gpus(self, shape: FleetShape) -> int:
        return shape.gpus(*self.question.machines)

    def _rate_bound(self, shape: FleetShape) -> float:
        return shape.workers * self.trials.traffic.max_worker_rate

    # All fleets

    def check(self) -> None:
        check_feasible(self.trials)

    @cached_property
    def _hints(self) -> SplitHints:
        return split_hints(self.question, self.trials.traffic)

    def rough_rates(self, family: str, gpus: int, floor: float = 0.0) -> list[ServedRate]:
        """Return the rough rates of a family's fleets above `floor`.

        Each split is tried with the last policy, and the best splits with the others.
        """
        *others, last = self.question.policies
        tried = shapes(family, gpus, self._hints)
        splits = [replace(shape, policy=last) for shape in tried]
        # This family has many shapes and is rarely the best: drop it early.
        if family == SHORT_APART:
            floor = max(floor, self._best_rough_rates[gpus])
        with self.progress.part(0.0, 0.5):
            rough = self._keep_best(splits, floor)
        best = [served.shape for served in _by_rate(rough)[:MAX_FINALISTS]]
        if not best and not floor:
            best = splits  # none serves anything with that policy
        with_others = [replace(shape, policy=policy) for policy in others for shape in best]
        with self.progress.part(0.5, 1.0):
            return rough + self._keep_best(with_others, _best_rate(rough) or floor)

    def _keep_best(
        self, tried: list[FleetShape], floor: float = 0.0, *, likely: float = 0.0
    ) -> list[ServedRate]:
        """Return rough rates, without those of fleets below `floor` or the best of them."""
        rough: list[ServedRate] = []
        for shape in self.progress.each(tried):
            self.progress.note(str(shape))
            min_rate = max(_best_rate(rough), floor) * (1 - EQUAL_RATE_SHARE)
            rate_hint = min_rate or likely
            start = rate_hint or self.trials.worker_rate * shape.workers * 0.5
            step = MAX_ROUGH_RATIO if rate_hint else WIDE_STEP
            if (served := self.rough_rate(shape, start, min_rate=min_rate, step=step)) is not None:
                rough.append(served)
                gpus = self._gpus(shape)
                self._best_rough_rates[gpus] = max(self._best_rough_rates[gpus], served.rate)
        return rough

    def _judge_finalists(self, rough: list[ServedRate], floor: float = 0.0) -> list[ServedRate]:
        """Judge the finalist that serves the hardest draw best; others if they may exceed it."""
        finalists = _finalists(rough)
        remaining = [finalist.shape for finalist in finalists]
        start, judged = floor or finalists[0].rate / MAX_ROUGH_RATIO, list[ServedRate]()
        while (chosen := self._best_by_hardest(remaining, start, floor)) is not None:
            remaining.remove(chosen.shape)
            by_all = self.judge(chosen.shape, chosen.rate, min_rate=floor)
            if by_all is not None:
                judged.append(by_all)
                start = floor = by_all.rate * (1 + EQUAL_RATE_SHARE)
                if by_all.rate >= chosen.rate:
                    break
        return rank_fleets(judged)

    def _best_by_hardest(
        self, tried: list[FleetShape], start: float, floor: float
    ) -> ServedRate | None:
        """Return the best fleet by the draw that failed last; None if all are below `floor`.

        Each next fleet must exceed the best by `EQUAL_RATE_SHARE`, or be simpler and equal to it.
        """
        best: ServedRate | None = None
        min_rate = floor
        for shape in self.progress.each(tried):
            self.progress.note(str(shape))
            if best is not None:
                simpler = _simplicity(shape) < _simplicity(best.shape)
                margin = -EQUAL_RATE_SHARE if simpler else EQUAL_RATE_SHARE
                min_rate = max(best.rate * (1 + margin), floor)
                start = best.rate if simpler else min_rate
            best = self.judge(shape, start, min_rate=min_rate, draws=1) or best
        return best

    def _judge_family(self, rough: list[ServedRate], floor: float = 0.0) -> list[ServedRate]:
        judged = self._judge_finalists(rough, floor)
        better = self._better_thresholds(judged[0]) if judged else ()
        return rank_fleets([*judged, *better])

    def _better_thresholds(self, served: ServedRate) -> Iterator[ServedRate]:
        """Yield the fleet with each threshold of hand-overs that raises its rate."""
        if not served.shape.prefill:
            return
        half = self.trials.traffic.prompts[len(self.trials.traffic.prompts) // 2]
        for above in sorted({1, half}):
            shape = replace(served.shape, disaggregate_above=above)
            min_rate = served.rate * (1 + EQUAL_RATE_SHARE)
            if (better := self.judge(shape, min_rate, min_rate=min_rate)) is not None:
                yield better

    def best(self, gpus: int, floor: float = 0.0) -> list[ServedRate]:
        """Return the best fleet of each family, best first; none if all are below `floor`.

        Families behind the best are judged by fewer runs.
        """
        families = self.question.families
        with self.progress.part(0.0, 0.5):
            rough = [self.rough_rates(family, gpus) for family in self.progress.each(families)]
        promising = sorted(filter(None, rough), key=lambda rates: -_best_rate(rates))
        judged: list[ServedRate] = []
        behind: list[list[ServedRate]] = []
        with self.progress.part(0.5, 0.9):
            for rates in self.progress.each(promising):
                min_rate = max(_best_rate(judged) * (1 - EQUAL_RATE_SHARE), floor)
                may_reach = _best_rate(rates) * MAX_ROUGH_RATIO >= min_rate
                reached = self._judge_family(rates, min_rate)[:1] if may_reach else []
                judged += reached
                if not reached:
                    behind.append(rates)
        behind_judged: list[ServedRate] = []
        if judged:
            with self.progress.part(0.9, 1.0):
                max_rate = _best_rate(judged) * (1 - EQUAL_RATE_SHARE)
                for rates in self.progress.each(behind):
                    behind_judged += self._judge_quickly(rates, max_rate)
        return rank_fleets(judged) + rank_fleets(behind_judged)

    def best_so_far(self, gpus: int) -> list[ServedRate]:
        best: dict[str, ServedRate] = {}
        for served in rank_fleets(
            [served for served in self._judged if self._gpus(served.shape) <= gpus]
        ):
            best.setdefault(served.shape.family, served)
        return list(best.values())

    def with_one_fewer(self, served: ServedRate) -> ServedRate | None:
        return self._of_next_size(served, -1, 0.0)

    def with_one_more(self, served: ServedRate) -> ServedRate | None:
        """Return the rate of the same kind of fleet with one worker more; None if not higher."""
        larger = self._of_next_size(served, 1, served.rate)
        return larger if larger and larger.rate > served.rate else None

    def _of_next_size(self, served: ServedRate, change: int, floor: float) -> ServedRate | None:
        """Choose the similar fleet that serves the hardest draw best, and judge it."""
        start = served.likely_with(change)
        with self.progress.part(0.0, 0.5):
            similar = self._similar_fleets(served.shape, change)
            best = self._best_by_hardest(similar, start, floor or start * IDLE_LOAD)
        with self.progress.part(0.5, 1.0):
            return best and self.judge(best.shape, best.rate, min_rate=floor, draws=FEW_DRAWS)

    def at_size(self, served: ServedRate, change: int) -> ServedRate | None:
        """Return the rate of the same kind of fleet with `change` more workers, by fewer runs."""
        quick, likely = self._quick, served.likely_with(change)
        similar = self._similar_fleets(served.shape, change)
        # Small fleets may need another policy.
        similar += [replace(shape, policy=self.question.policies[-1]) for shape in similar]
        with self.progress.part(0.0, 0.5):
            rough = quick._keep_best(list(dict.fromkeys(similar)), likely=likely)
        best = max(rough, key=lambda served: served.rate, default=None)
        with self.progress.part(0.5, 1.0):
            return best and quick.judge(best.shape, likely)

    @cached_property
    def _quick(self) -> FleetSearch:
        """A search with fewer and shorter runs."""
        question = self.question
        draws = min(question.draws, FEW_DRAWS)
        quick = replace(question, effort=question.effort * QUICK_EFFORT, draws=draws)
        return FleetSearch(quick, self.progress)

    def _judge_quickly(self, rough: list[ServedRate], max_rate: float) -> list[ServedRate]:
        """Judge the fleet with the highest rough rate, up to `max_rate`."""
        best = max(rough, key=lambda served: served.rate)
        judged = self._quick.judge(best.shape, best.rate, max_rate=max_rate)
        return [judged] if judged else []

    def serving(self, gpus: int, rate: float) -> ServedRate | None:
        """Return a fleet that serves a rate, with the last policy; None if no split does."""
        policy = self.question.policies[-1]
        for family in self.question.families:
            for split in shapes(family, gpus, self._hints):
                shape = replace(split, policy=policy)
                self.progress.note(f"{gpus} GPUs: {shape}")
                if rate > self._rate_bound(shape) or self.trials.serves(shape, rate) is None:
                    continue
                if (served := self.judge(shape, rate, min_rate=rate)) is not None:
                    return served
        return None

    def _similar_fleets(self, shape: FleetShape, change: int) -> list[FleetShape]:
        """Return fleets of the same kind with `change` more workers."""
        nearest = [
            shape.with_more(role, change)
            for role, count in shape.pools.items()
            if count + change > 0
        ]
        if nearest and abs(change) == 1:
            return nearest
        gpus = self._gpus(shape) + change * self.question.machine.gpus
        hints, limit = self._hints, shape.short_limit
        if limit in hints.boundaries:
            hints = replace(hints, boundaries={limit: hints.boundaries[limit]})
        others = [
            replace(close_shape, disaggregate_above=shape.disaggregate_above, policy=shape.policy)
            for close_shape in shapes(shape.family, gpus, hints)
        ]
        similar = others or nearest
        if similar or self.question.prefill_machine is not None:
            return similar
        # Several pools need several workers.
        policy = self.question.policies[-1]
        pools = shapes(ONE_POOL, gpus, hints)
        return [replace(pool, policy=policy) for pool in pools]


def split_hints(question: PlanQuestion, traffic: TrafficStats) -> SplitHints:
    machine, prompt_machine = question.machine, question.prompt_machine
    time, prompt_time = (
        worker.time.linear_near(32, worker.max_num_batched_tokens)
        for worker in (machine, prompt_machine)
    )
    largest = traffic.totals[-1]
    boundaries: dict[int, float] = {}
    for share in BOUNDARY_QUANTILES:
        limit = _round(traffic.totals[int(share * (len(traffic.totals) - 1))])
        if traffic.totals[0] <= limit < min(largest, machine.max_model_len):
            boundaries[limit] = traffic.above(limit)
    prefill = prompt_machine.gpus * capacity_bound.prefill_work(
        prompt_time, traffic.prompt, prompt_machine.max_num_batched_tokens
    )
    steps = max(traffic.output - 1, 0)
    # A decode step is shared by a few tens of requests.
    decode = (
        machine.gpus
        * steps
        * (time.decode_s + time.context_s * traffic.prompt + time.decode_fixed_s / 32)
    )
    total = prefill + decode
    itl_s = question.targets.itl or question.targets.tpot
    return SplitHints(
        boundaries=boundaries,
        prefill_share=prefill / total if total else 0.5,
        gpus=machine.gpus,
        prefill_gpus=prompt_machine.gpus,
        itl_ms=100 if itl_s is None else max(round(itl_s * 1000), 1),
    )


def rank_fleets(fleets: list[ServedRate]) -> list[ServedRate]:
    """Return the fleets, best first; among equal rates the simplest first."""
    remaining, best_first = list(fleets), list[ServedRate]()
    while remaining:
        max_rate = max(served.rate for served in remaining)
        equal = [served for served in remaining if served.rate >= max_rate * (1 - EQUAL_RATE_SHARE)]
        first = min(equal, key=lambda served: (*_simplicity(served.shape), -served.rate))
        remaining.remove(first)
        best_first.append(first)
    return best_first


def _best_rate(fleets: list[ServedRate]) -> float:
    return max((served.rate for served in fleets), default=0.0)


def _by_rate(fleets: list[ServedRate]) -> list[ServedRate]:
    return sorted(fleets, key=lambda served: -served.rate)


def _finalists(fleets: list[ServedRate]) -> list[ServedRate]:
    """Return the highest rough rates, and the best of each policy within their error."""
    by_rate = _by_rate(fleets)
    chosen = by_rate[:MAX_FINALISTS]
    policies = {served.shape.policy for served in chosen}
    for served in by_rate[MAX_FINALISTS:]:
        if served.shape.policy not in policies and served.rate * MAX_ROUGH_RATIO >= by_rate[0].rate:
            policies.add(served.shape.policy)
            chosen.append(served)
    return chosen


def _simplicity(shape: FleetShape) -> tuple[int, int]:
    return FAMILIES.index(shape.family), POLICIES.index(shape.policy)


def _round(tokens: int) -> int:
    """Round to two digits, for readers."""
    return int(float(f"{tokens:.2g}"))

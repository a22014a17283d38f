"""The best fleet for a traffic, by simulation.

Fleets are compared by the highest rate at which a share of the requests (90 %, as in `sweep`) is in
time. One draw of the requests brackets a rough rate; a fleet far below the best is dropped after
one run. Other draws judge the finalists (`capacity_search`). Rates within `SAME` are equal; then
the earlier family and fewer policies win.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from vllm_sched.sim.planning import capacity_bound
from vllm_sched.sim.planning.capacity_search import RUNG_RATIO, CapacitySearch
from vllm_sched.sim.planning.feasibility import check_feasible
from vllm_sched.sim.planning.fleet_shapes import (
    FAMILIES,
    POLICIES,
    SHORT_APART,
    FleetShape,
    TrafficHints,
    shapes,
)
from vllm_sched.sim.planning.trials import IDLE_LOAD, FleetTrials

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_sched.sim.fleet.aggregate_flow import FlowResult
    from vllm_sched.sim.planning.question import PlanQuestion

SAME: Final = 0.04  # rates this close are equal
MAX_ROUGH_RATIO: Final = 1.12  # ratio of the two sides of a rough rate
MAX_FINALISTS: Final = 3  # per family, plus the best of each policy that is close
BOUNDARY_QUANTILES: Final = (0.5, 0.75, 0.9, 0.97)
MAX_ROUGH_RUNS: Final = 24
Tell = Callable[[str, float], None]  # activity, overall progress


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


class FleetSearch:
    def __init__(self, question: PlanQuestion, tell: Tell = lambda _what, _share: None) -> None:
        self.question = question
        self.trials = FleetTrials(question, self.note)
        self._told, self._done = tell, 0.0
        self._roughly: dict[int, float] = {}  # best rough rate, by number of workers
        self._judged: list[ServedRate] = []
        self._judge = CapacitySearch(question.draws, self._served_of, self.trials.enough)

    def tell(self, what: str, share: float) -> None:
        self._done = share
        self._told(what, share)

    @property
    def done(self) -> float:
        return self._done

    def note(self, what: str) -> None:
        self._told(what, self._done)

    def _served_of(self, shape: FleetShape, rate: float, draw: int) -> FlowResult | None:
        run = self.trials.play(shape, rate, fine=True, draw=draw)
        return run if self.trials.enough(run, strict=False) else None

    def rate_of(self, shape: FleetShape, start: float, *, least: float = 0.0) -> ServedRate | None:
        """Return the rough rate by one draw, up to the compute bound; None if below `least`."""
        most = self._most(shape)
        if least > most:
            return None
        best: FlowResult | None = None
        low, high = 0.0, math.inf
        rate = min(max(start, least), most)
        for _ in range(MAX_ROUGH_RUNS):
            if (run := self.trials.serves(shape, rate)) is not None:
                best, low = run, rate
                if high < math.inf or rate >= most:
                    break
                rate = min(1.6 * rate, most)
            else:
                high = rate
                if rate <= least or low:
                    break
                rate = max(rate / 1.6, least)
        if best is None:
            return None
        while high / low > MAX_ROUGH_RATIO and high < math.inf:
            rate = math.sqrt(low * high)
            if (run := self.trials.serves(shape, rate)) is not None:
                best, low = run, rate
            else:
                high = rate
        return ServedRate(shape, low, best)

    def judged(self, shape: FleetShape, start: float, *, least: float = 0.0) -> ServedRate | None:
        """Return the rate by all judging draws; None if below `least`."""
        most = self._most(shape)
        if least > most:
            return None
        # If an idle worker misses the targets, so does every lower rate.
        least = max(least, min(self.trials.worker_rate, start) * IDLE_LOAD)
        verdict = self._judge.highest(shape, start, least=least, most=most)
        if verdict is None:
            return None
        shares = tuple(run.all.share for run in verdict.runs)
        served = ServedRate(shape, verdict.rate, verdict.run, shares)
        self._judged.append(served)
        return served

    def _most(self, shape: FleetShape) -> float:
        return shape.workers * self.trials.traffic.most_each

    # All fleets

    def check(self) -> None:
        check_feasible(self.trials)

    def seen(self) -> TrafficHints:
        traffic, machine = self.trials.traffic, self.question.machine
        time = machine.time.near(32, machine.max_num_batched_tokens)
        largest = traffic.totals[-1]
        boundaries: dict[int, float] = {}
        for share in BOUNDARY_QUANTILES:
            limit = _round(traffic.totals[int(share * (len(traffic.totals) - 1))])
            if traffic.totals[0] <= limit < min(largest, machine.max_model_len):
                boundaries[limit] = traffic.above(limit)
        prefill = capacity_bound.prefill_work(time, traffic.prompt, machine.max_num_batched_tokens)
        steps = max(traffic.output - 1, 0)
        # A decode step is shared by a few tens of requests.
        decode = steps * (
            time.decode_s + time.context_s * traffic.prompt + time.decode_fixed_s / 32
        )
        whole = prefill + decode
        return TrafficHints(boundaries=boundaries, prefill_share=prefill / whole if whole else 0.5)

    def family(self, family: str, workers: int, share: tuple[float, float]) -> list[ServedRate]:
        """Return the judged fleets of a family, best first; `share` is the range of progress."""
        tried = shapes(family, workers, self.seen(), self.question.policies, self._itl_ms())
        # This family has many shapes and is rarely the best: drop it early.
        floor = self._roughly.get(workers, 0.0) if family == SHORT_APART else 0.0
        found = self._of_kind(list(tried), share, floor)
        return rank_fleets(
            [*found, *(each for best in found[:1] for each in self._thresholds(best))]
        )

    def _of_kind(
        self, tried: list[FleetShape], share: tuple[float, float], floor: float = 0.0
    ) -> list[ServedRate]:
        """Judge the finalists by rough rate; drop fleets well below `floor`."""
        found: list[ServedRate] = []
        width = (share[1] - share[0]) / (2 * max(len(tried), 1))
        for at, shape in enumerate(tried):
            self.tell(str(shape), share[0] + at * width)
            best = max((each.rate for each in found), default=floor)
            least = best * (1 - SAME)
            start = least or self.trials.worker_rate * shape.workers * 0.5
            if (served := self.rate_of(shape, start, least=least)) is not None:
                found.append(served)
                most = max(self._roughly.get(shape.workers, 0.0), served.rate)
                self._roughly[shape.workers] = most
        # Simplest first: the others must exceed its rate by `SAME`.
        finalists = sorted(_finalists(found), key=_plainness)
        half, judged = (share[0] + share[1]) / 2, list[ServedRate]()
        for at, each in enumerate(finalists):
            self.tell(str(each.shape), half + (share[1] - half) * at / len(finalists))
            least = max((one.rate for one in judged), default=0.0) * (1 + SAME)
            again = self.judged(each.shape, least or each.rate * MAX_ROUGH_RATIO, least=least)
            if again is not None:
                judged.append(again)
        return rank_fleets(judged)

    def _thresholds(self, served: ServedRate) -> Iterator[ServedRate]:
        if not served.shape.prefill:
            return
        half = self.trials.traffic.prompts[len(self.trials.traffic.prompts) // 2]
        for above in sorted({1, half}):
            shape = replace(served.shape, disaggregate_above=above)
            least = served.rate * (1 + SAME)
            if (better := self.judged(shape, least, least=least)) is not None:
                yield better

    def _itl_ms(self) -> int:
        targets = self.question.targets
        wanted = targets.itl or targets.tpot
        return 100 if wanted is None else max(round(wanted * 1000), 1)

    def best(self, workers: int, share: tuple[float, float] = (0.0, 1.0)) -> list[ServedRate]:
        families = self.question.families
        width = (share[1] - share[0]) / len(families)
        found = []
        for at, family in enumerate(families):
            start = share[0] + at * width
            found += self.family(family, workers, (start, start + width))[:1]
        return rank_fleets(found)

    def so_far(self, workers: int) -> list[ServedRate]:
        best: dict[str, ServedRate] = {}
        for each in rank_fleets([each for each in self._judged if each.shape.workers == workers]):
            best.setdefault(each.shape.family, each)
        return list(best.values())

    def fewer(self, served: ServedRate, share: tuple[float, float]) -> ServedRate | None:
        return next(iter(self._of_kind(self._alike(served.shape, -1), share)), None)

    def more(self, served: ServedRate, share: tuple[float, float]) -> ServedRate | None:
        """Return the rate of the same kind of fleet with one worker more; None if not higher."""
        best: ServedRate | None = None
        tried = self._alike(served.shape, 1)
        start = served.rate * (served.shape.workers + 1) / served.shape.workers
        for at, shape in enumerate(tried):
            self.tell(str(shape), share[0] + (share[1] - share[0]) * at / len(tried))
            # Asking for one rung more lets most other shapes fail in one run.
            least = served.rate if best is None else best.rate * RUNG_RATIO
            found = self.judged(shape, start if best is None else least, least=least)
            best = found or best
        return best

    def _alike(self, shape: FleetShape, change: int) -> list[FleetShape]:
        """Return fleets of the same kind with `change` more workers, the nearest shapes first."""
        workers = shape.workers + change
        if workers < 1:
            return []
        seen, limit = self.seen(), shape.short_limit
        if limit in seen.boundaries:
            seen = replace(seen, boundaries={limit: seen.boundaries[limit]})
        nearest = [
            shape.with_more(role, change)
            for role, count in shape.pools.items()
            if count + change > 0
        ]
        others = [
            replace(each, disaggregate_above=shape.disaggregate_above)
            for each in shapes(shape.family, workers, seen, (shape.policy,), shape.itl_ms)
        ]
        return list(dict.fromkeys([*nearest, *others]))


def rank_fleets(found: list[ServedRate]) -> list[ServedRate]:
    """Return the fleets, best first; among equal rates the simplest first."""
    left, best_first = list(found), list[ServedRate]()
    while left:
        most = max(each.rate for each in left)
        equal = [each for each in left if each.rate >= most * (1 - SAME)]
        first = min(equal, key=_plainness)
        left.remove(first)
        best_first.append(first)
    return best_first


def _finalists(found: list[ServedRate]) -> list[ServedRate]:
    """Return the highest rough rates, and the best of each policy within their error."""
    by_rate = sorted(found, key=lambda each: -each.rate)
    chosen = by_rate[:MAX_FINALISTS]
    policies = {each.shape.policy for each in chosen}
    for each in by_rate[MAX_FINALISTS:]:
        if each.shape.policy not in policies and each.rate * MAX_ROUGH_RATIO >= by_rate[0].rate:
            policies.add(each.shape.policy)
            chosen.append(each)
    return chosen


def _plainness(served: ServedRate) -> tuple[int, int, float]:
    shape = served.shape
    return FAMILIES.index(shape.family), POLICIES.index(shape.policy), -served.rate


def _round(tokens: int) -> int:
    """Round to two digits, for readers."""
    return int(float(f"{tokens:.2g}"))

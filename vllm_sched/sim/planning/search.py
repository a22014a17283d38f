"""The best fleet for a traffic, by simulation.

What is compared is the rate that a fleet serves: the highest of which so many requests (nine out of
ten, as in `sweep`) are in time. Roughly, it is closed in on from both sides with one draw of the
requests, the same for every fleet; a fleet that does not nearly serve what the best so far does (of
its family; a short pool beside prefill and decode: of all) is left after one run. How those few
that are left are ordered, and what is named, other draws say (`judge`). Fleets within `SAME` of
each other are equal, and the simpler one is taken: the family that comes first, and in it fewer
policies.

Nobody may be starved for the others' sake: of the longest tenth of the prompts, too, nine out of
ten have to be in time, or to have their first token within `BORNE` times what they take alone.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.results.knee import SERVED_SHARE
from vllm_sched.bench.traffic.sampled import Sampled, without_end
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.aggregate_flow import AggregateFlow, FlowResult
from vllm_sched.sim.planning import capacity_bound
from vllm_sched.sim.planning.capacity_search import STEP, CapacitySearch, DrawnRequests
from vllm_sched.sim.planning.fleet_shapes import (
    FAMILIES,
    POLICIES,
    SHORT_APART,
    FleetShape,
    TrafficHints,
    shapes,
)
from vllm_sched.sim.planning.traffic_stats import TrafficStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_sched.bench.results.goodput import Targets
    from vllm_sched.bench.traffic.types import Request, TrafficSource
    from vllm_sched.sim.types import WorkerModel

SAME: Final = 0.04  # rates this close are equal
NEAR: Final = 1.12  # how near the two sides of a rough rate come
# A run has at least so many requests, and lasts so many times the target for a first token: a queue
# that grows by a tenth of that time would be taken for none in a shorter one.
COARSE_REQUESTS, FINE_REQUESTS = 1000, 4800
COARSE_LASTS, FINE_LASTS = 20.0, 25.0
LEAST_TTFT_S: Final = 3.0
# But no more than so many, a large fleet is steadier and plans are waited for, unless it would last
# so few times that target: what is served within it whenever it comes would be served at any rate.
COARSE_MOST, FINE_MOST = 5_000, 8_000
LEAST_LASTS: Final = 4.0
WARM: Final = 0.2  # of a run, in which it fills up: not counted
# Nor is a rate served at which the queue grows, by so many seconds a second: in the end it would be
# longer than any target, or never end where none is for it.
GROWS, GROWS_BRIEFLY = 0.04, 0.1
FINALISTS: Final = 3  # of each family, and the best of each policy that may serve as much
DRAWS, FEW_DRAWS = 6, 3  # of which each has to have enough in time
# How far the seeds of draws are from each other, and from those that somebody replays a plan with.
SEEDS_APART: Final = 1_000_003
SAMPLE: Final = 4000  # requests that the traffic is known by; a trace by all that are kept of it
QUANTILES: Final = (0.5, 0.75, 0.9, 0.97)
DOUBLINGS: Final = 24
BORNE: Final = 4.0
LONGEST: Final = 0.9  # the share of prompts that are not among the longest
REST, LONG = "rest", "long"
IDLE: Final = 0.02  # of what computing allows: a worker that has nothing else to do
Tell = Callable[[str, float], None]  # what is being done, and how much of all is done


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is to be planned for."""

    source: TrafficSource
    machine: WorkerModel
    targets: Targets
    burstiness: float | None = None
    scale: float = 1.0
    prefix_hit: float | None = None
    seed: int = 0
    policies: tuple[str, ...] = POLICIES
    families: tuple[str, ...] = FAMILIES
    share: float = SERVED_SHARE
    effort: float = 1.0  # requests in each run, against the usual
    draws: int = DRAWS

    def __post_init__(self) -> None:
        """Take a trace from all over the file, and without end."""
        source = without_end(self.source, random.Random(self.seed))
        object.__setattr__(self, "source", source)

    def schedule(self, rate: float, count: int, draw: int = 0) -> Schedule:
        """Make requests at a rate; those of draw 0 are searched with."""
        return Schedule(
            source=self.source,
            rate=rate,
            burstiness=self.burstiness,
            count=count,
            duration_s=2 * count / rate + 1,
            seed=self.seed + draw * SEEDS_APART,
            scale=self.scale,
            prefix_hit=self.prefix_hit,
        )

    def shapes(self, draw: int = 0) -> Iterator[Request]:
        """Draw requests without end, their times aside."""
        return replace(self.schedule(1.0, 1, draw), count=None).shapes()


@dataclass(frozen=True, slots=True)
class ServedRate:
    """A fleet, and the rate that it serves."""

    shape: FleetShape
    rate: float
    run: FlowResult  # at that rate, all draws together
    shares: tuple[float, ...] = ()  # in time, of each draw

    @property
    def spread(self) -> tuple[float, float]:
        """Return what was in time of the worst draw and of the best."""
        shares = self.shares or (self.run.all.share,)
        return min(shares), max(shares)


class FleetSearch:
    """Searches, with the same requests for every fleet."""

    def __init__(self, question: PlanQuestion, tell: Tell = lambda _what, _share: None) -> None:
        self.question = question
        source = question.source
        some = max(SAMPLE, source.held) if isinstance(source, Sampled) else SAMPLE
        sample = list(islice(question.shapes(), some))
        if not sample:
            raise UsageError(f"{source.name}: there is no request in it to plan for")
        self.traffic = TrafficStats.of(sample, question.machine)
        self.runs = 0
        self._told, self._done = tell, 0.0
        self._start = self._by_hand()
        self._short_to = _short_to(self.traffic.prompts)
        self._drawn: dict[int, DrawnRequests] = {}
        self._roughly: dict[int, float] = {}  # the best rough rate of so many workers
        self._judged: list[ServedRate] = []
        self._judge = CapacitySearch(question.draws, self._served_of, self.enough)
        machine = question.machine

        @lru_cache(maxsize=65_536)
        def borne_s(prompt: int) -> float:
            alone = capacity_bound.prefill_seconds(
                machine.time, prompt, machine.max_num_batched_tokens
            )
            return BORNE * alone

        self.borne_s = borne_s

    def _by_hand(self) -> float:
        machine, traffic = self.question.machine, self.traffic
        return capacity_bound.Capacity.of(machine, traffic.prompt, traffic.output).requests_per_s

    def tell(self, what: str, share: float) -> None:
        """Say what is done now, and how much of all that was asked for is."""
        self._done = share
        self._told(what, share)

    @property
    def done(self) -> float:
        """How much of all that was asked for is done."""
        return self._done

    def note(self, what: str) -> None:
        """Say how far it is with what is done now."""
        self._told(what, self._done)

    # One fleet

    def count(self, rate: float, *, fine: bool) -> int:
        """How many requests a run has."""
        question = self.question
        target = max(question.targets.ttft or 0.0, LEAST_TTFT_S)
        lasts = (FINE_LASTS if fine else COARSE_LASTS) * target
        least, most = (FINE_REQUESTS, FINE_MOST) if fine else (COARSE_REQUESTS, COARSE_MOST)
        most = max(most, math.ceil(rate * LEAST_LASTS * target))
        return max(round(min(max(rate * lasts, least), most) * question.effort), 50)

    def play(
        self, shape: FleetShape, rate: float, *, fine: bool, whole: bool = False, draw: int = 0
    ) -> FlowResult:
        """Play a fleet at a rate; unless the `whole` is asked for, a failed run not to its end."""
        question = self.question
        total = self.count(rate, fine=fine)
        # Of a large fleet one run takes long.
        self.note(f"{shape}: {total:,} requests")
        requests = self._requests(draw).at(question.schedule(rate, total, draw).moments())
        flow = self._flow(shape)
        self.runs += 1
        warm = int(WARM * total)
        if whole:
            return flow.play(requests, warm=warm)
        longs = sum(each.klass == LONG for each in requests[warm:])
        most_late = (1 - question.share) * (total - warm) + 1
        most_lost = (1 - self._least_kept(longs)) * longs + 1
        return flow.play(requests, warm=warm, most_late=most_late, most_lost={LONG: most_lost})

    def _flow(self, shape: FleetShape) -> AggregateFlow:
        machine, targets = self.question.machine, self.question.targets
        return AggregateFlow(shape.placed(machine), shape.settings(), targets, self.borne_s)

    def _requests(self, draw: int) -> DrawnRequests:
        """Give a draw of the requests: the same for all fleets."""
        if draw not in self._drawn:
            self._drawn[draw] = DrawnRequests(self.question.shapes(draw), self.class_of)
        return self._drawn[draw]

    def class_of(self, prompt: int) -> str:
        """Say whether a prompt is among the longest."""
        return LONG if prompt > self._short_to else REST

    def enough(self, run: FlowResult, *, strict: bool = True, brief: bool = False) -> bool:
        """Whether enough were in time, and of the longest not too late, and no queue grew.

        In a single run there are few of the longest: unless one is `strict`, what may be chance is
        let pass. A brief one, with real schedulers, says less of queues.
        """
        if run.failed or run.growth > (GROWS_BRIEFLY if brief else GROWS):
            return False
        share, longs = self.question.share, run.classes.get(LONG)
        least = share if strict else self._least_kept(longs.arrived if longs else 0)
        return run.all.share >= share and longest_kept(run) >= least

    def _least_kept(self, longs: int) -> float:
        """Return the share of so many of the longest that may not be too late in one run."""
        share = self.question.share
        return share - math.sqrt(share * (1 - share) / longs) if longs else share

    def _served_of(self, shape: FleetShape, rate: float, draw: int) -> FlowResult | None:
        """Play a draw of the requests; None if too few were in time."""
        run = self.play(shape, rate, fine=True, draw=draw)
        return run if self.enough(run, strict=False) else None

    def serves(self, shape: FleetShape, rate: float) -> FlowResult | None:
        """Play it, roughly; None if too few were in time."""
        run = self.play(shape, rate, fine=False)
        return run if self.enough(run, strict=False) else None

    def rate_of(self, shape: FleetShape, start: float, *, least: float = 0.0) -> ServedRate | None:
        """Find roughly what it serves, by one draw; None if that is not even the least.

        What its computing allows it never exceeds: a run that ends before a queue is felt would.
        """
        most = self._most(shape)
        if least > most:
            return None
        best: FlowResult | None = None
        low, high = 0.0, math.inf
        rate = min(max(start, least), most)
        for _ in range(DOUBLINGS):
            if (run := self.serves(shape, rate)) is not None:
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
        while high / low > NEAR and high < math.inf:
            rate = math.sqrt(low * high)
            if (run := self.serves(shape, rate)) is not None:
                best, low = run, rate
            else:
                high = rate
        return ServedRate(shape, low, best)

    def judged(self, shape: FleetShape, start: float, *, least: float = 0.0) -> ServedRate | None:
        """Find what it serves by every draw that nothing was chosen by; None if not the least."""
        most = self._most(shape)
        if least > most:
            return None
        # What a worker does not serve that has nothing else to do, no lower rate mends.
        least = max(least, min(self._start, start) * IDLE)
        verdict = self._judge.highest(shape, start, least=least, most=most)
        if verdict is None:
            return None
        shares = tuple(run.all.share for run in verdict.runs)
        served = ServedRate(shape, verdict.rate, verdict.run, shares)
        self._judged.append(served)
        return served

    def _most(self, shape: FleetShape) -> float:
        return shape.workers * self.traffic.most_each

    # All of them

    def check(self) -> None:
        """Refuse what no fleet could do, however large."""
        question, traffic = self.question, self.traffic
        holds = question.machine.max_model_len
        at = bisect_left(traffic.totals, holds + 1)
        fits = at / len(traffic.totals)
        if fits < question.share:
            raise UsageError(
                f"{question.source.name}: {1 - fits:.0%} of the requests are longer than the "
                f"{holds:,} tokens that a worker of {question.machine.profile} holds; use a "
                "larger machine or a --scale below 1"
            )
        run = self._idle()
        if not self.enough(run, strict=False):
            raise UsageError(self._hopeless(run))

    def _idle(self) -> FlowResult:
        """Play a draw of those that judge to a worker that has nothing else to do.

        At even gaps: whether some come at once is for fleets to bear, who may have many workers.
        """
        rate = min(self._start, self.traffic.most_each) * IDLE
        total = self.count(rate, fine=True)
        requests = self._requests(1).at([at / rate for at in range(1, total + 1)])
        self.runs += 1
        return self._flow(FleetShape(general=1)).play(requests)

    def _hopeless(self, run: FlowResult) -> str:
        """Say what an idle worker does; of the longest, where all together have enough."""
        question, share = self.question, self.question.share
        who, met, figures = question.source.name, run.all.share, run.all
        named = {
            "ttft": figures.ttft, "tpot": figures.tpot, "itl": figures.longest,
            "e2el": figures.e2el,
        }  # fmt: skip
        if met >= share and (longs := run.classes.get(LONG)) is not None:
            # Their first tokens may come as late as they take, and so may their ends: it is what
            # comes between that is too slow.
            who, met = f"the longest of {who}", longs.kept_share
            named = {"tpot": longs.tpot, "itl": longs.longest}
        missed = [
            f"{name}:{_up(sketch.quantile(share) * 1000)}"
            for name, sketch in named.items()
            if (target := getattr(question.targets, name)) is not None
            and sketch.quantile(share) > target
        ]
        # Each may be met by enough, and all together not.
        wanted = f"{' '.join(missed)} at the least" if missed else "looser targets"
        return (
            f"--goodput: no number of {question.machine.profile} meets it: on an idle worker "
            f"{math.floor(100 * met)}% of {who} are in time, and {share:.0%} should be; ask for "
            f"{wanted}"
        )

    def seen(self) -> TrafficHints:
        """See what fleets are worth a try."""
        traffic, machine = self.traffic, self.question.machine
        time = machine.time
        largest = traffic.totals[-1]
        boundaries: dict[int, float] = {}
        for share in QUANTILES:
            limit = _round(traffic.totals[int(share * (len(traffic.totals) - 1))])
            if traffic.totals[0] <= limit < min(largest, machine.max_model_len):
                boundaries[limit] = traffic.above(limit)
        prefill = capacity_bound.prefill_work(time, traffic.prompt, machine.max_num_batched_tokens)
        steps = max(traffic.output - 1, 0)
        # An answer's steps are shared by a few tens of others.
        decode = steps * (
            time.decode_s + time.context_s * traffic.prompt + time.decode_fixed_s / 32
        )
        whole = prefill + decode
        return TrafficHints(boundaries=boundaries, prefill_share=prefill / whole if whole else 0.5)

    def family(self, family: str, workers: int, share: tuple[float, float]) -> list[ServedRate]:
        """Find the best of a family, best first; `share` says from where to where all is done."""
        tried = shapes(family, workers, self.seen(), self.question.policies, self._itl_ms())
        # It has many ways, and is seldom the best: named only if it serves about what others do.
        floor = self._roughly.get(workers, 0.0) if family == SHORT_APART else 0.0
        found = self._of_kind(list(tried), share, floor)
        return ordered([*found, *(each for best in found[:1] for each in self._thresholds(best))])

    def _of_kind(
        self, tried: list[FleetShape], share: tuple[float, float], floor: float = 0.0
    ) -> list[ServedRate]:
        """Find roughly what fleets serve, and have those that serve most judged; best first.

        Who serves not nearly the `floor` is left.
        """
        found: list[ServedRate] = []
        width = (share[1] - share[0]) / (2 * max(len(tried), 1))
        for at, shape in enumerate(tried):
            self.tell(str(shape), share[0] + at * width)
            best = max((each.rate for each in found), default=floor)
            least = best * (1 - SAME)
            start = least or self._start * shape.workers * 0.5
            if (served := self.rate_of(shape, start, least=least)) is not None:
                found.append(served)
                most = max(self._roughly.get(shape.workers, 0.0), served.rate)
                self._roughly[shape.workers] = most
        # The simplest first: another has to serve more by what is not equal, or is left at once.
        finalists = sorted(_finalists(found), key=_plainness)
        half, judged = (share[0] + share[1]) / 2, list[ServedRate]()
        for at, each in enumerate(finalists):
            self.tell(str(each.shape), half + (share[1] - half) * at / len(finalists))
            least = max((one.rate for one in judged), default=0.0) * (1 + SAME)
            again = self.judged(each.shape, least or each.rate * NEAR, least=least)
            if again is not None:
                judged.append(again)
        return ordered(judged)

    def _thresholds(self, served: ServedRate) -> Iterator[ServedRate]:
        """Try fixed thresholds for hand-overs, where the router's own was good."""
        if not served.shape.prefill:
            return
        half = self.traffic.prompts[len(self.traffic.prompts) // 2]
        for above in sorted({1, half}):
            shape = replace(served.shape, disaggregate_above=above)
            least = served.rate * (1 + SAME)
            if (better := self.judged(shape, least, least=least)) is not None:
                yield better

    def _itl_ms(self) -> int:
        """Choose the gap that chunks are made for: what is asked of the slowest of them."""
        targets = self.question.targets
        wanted = targets.itl or targets.tpot
        return 100 if wanted is None else max(round(wanted * 1000), 1)

    def best(self, workers: int, share: tuple[float, float] = (0.0, 1.0)) -> list[ServedRate]:
        """Find the best of every family, best first."""
        families = self.question.families
        width = (share[1] - share[0]) / len(families)
        found = []
        for at, family in enumerate(families):
            start = share[0] + at * width
            found += self.family(family, workers, (start, start + width))[:1]
        return ordered(found)

    def so_far(self, workers: int) -> list[ServedRate]:
        """Give the best of every family of which one was judged, best first."""
        best: dict[str, ServedRate] = {}
        for each in ordered([each for each in self._judged if each.shape.workers == workers]):
            best.setdefault(each.shape.family, each)
        return list(best.values())

    def fewer(self, served: ServedRate, share: tuple[float, float]) -> ServedRate | None:
        """Find what a fleet of that kind and policy serves with one worker fewer."""
        return next(iter(self._of_kind(self._alike(served.shape, -1), share)), None)

    def more(self, served: ServedRate, share: tuple[float, float]) -> ServedRate | None:
        """Find what a fleet of that kind and policy serves with one worker more.

        None if no more than without: a worker that nobody has a use for takes nothing away.
        """
        best: ServedRate | None = None
        tried = self._alike(served.shape, 1)
        start = served.rate * (served.shape.workers + 1) / served.shape.workers
        for at, shape in enumerate(tried):
            self.tell(str(shape), share[0] + (share[1] - share[0]) * at / len(tried))
            # As long as one rung more is all that is asked for, most others take one run.
            least = served.rate if best is None else best.rate * STEP
            found = self.judged(shape, start if best is None else least, least=least)
            best = found or best
        return best

    def _alike(self, shape: FleetShape, change: int) -> list[FleetShape]:
        """Give fleets of that kind with so many workers more: of one role first."""
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


def _short_to(prompts: Sequence[int]) -> int:
    """Return the length above which a prompt is among the longest tenth.

    Where a tenth and more are of the greatest length, as in a made-up mixture, all these are; where
    there is but one length nobody is.
    """
    at = int(LONGEST * (len(prompts) - 1))
    if prompts[at] == prompts[-1]:
        at = max(bisect_left(prompts, prompts[-1]) - 1, 0)
    return prompts[at]


def longest_kept(run: FlowResult) -> float:
    """Return the share of the longest that were in time, or as late as may be borne."""
    longs = run.classes.get(LONG)
    return 1.0 if longs is None else longs.kept_share


def ordered(found: list[ServedRate]) -> list[ServedRate]:
    """Put the best first; of equals the simplest."""
    left, best_first = list(found), list[ServedRate]()
    while left:
        most = max(each.rate for each in left)
        equal = [each for each in left if each.rate >= most * (1 - SAME)]
        first = min(equal, key=_plainness)
        left.remove(first)
        best_first.append(first)
    return best_first


def _finalists(found: list[ServedRate]) -> list[ServedRate]:
    """Choose who is judged: those with the highest rough rates, and the best of each policy near.

    A rough rate is as much too low as the two sides of it are apart, and who is tried later begins
    nearer to the best: what is beaten by less than that may serve as much, and be simpler.
    """
    by_rate = sorted(found, key=lambda each: -each.rate)
    chosen = by_rate[:FINALISTS]
    policies = {each.shape.policy for each in chosen}
    for each in by_rate[FINALISTS:]:
        if each.shape.policy not in policies and each.rate * NEAR >= by_rate[0].rate:
            policies.add(each.shape.policy)
            chosen.append(each)
    return chosen


def _plainness(served: ServedRate) -> tuple[int, int, float]:
    shape = served.shape
    return FAMILIES.index(shape.family), POLICIES.index(shape.policy), -served.rate


def _round(tokens: int) -> int:
    """To two digits: somebody reads it."""
    return int(float(f"{tokens:.2g}"))


def _up(milliseconds: float) -> int:
    """To two digits, upwards."""
    digits: int = 10 ** max(math.floor(math.log10(max(milliseconds, 1.0))) - 1, 0)
    return math.ceil(milliseconds / digits) * digits

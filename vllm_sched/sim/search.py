"""The best fleet for a traffic, by simulation.

What is compared is the rate that a fleet serves: the highest of which so many requests (nine out of
ten, as in `sweep`) are in time. It is closed in on from both sides; every fleet is given the same
requests, sooner or later. A fleet that does not nearly serve what the best so far does is left
after one run. Fleets within `SAME` of each other are equal, and the simpler one is taken: the
family that comes first, and in it fewer policies.

Nobody may be starved for the others' sake: of the longest tenth of the prompts, too, nine out of
ten have to be in time, or to have their first token within `BORNE` times what they take alone.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.knee import SHARE
from vllm_sched.bench.traffic.sampled import Sampled, without_end
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError
from vllm_sched.sim import capacity
from vllm_sched.sim.flow import Flow, Run
from vllm_sched.sim.shapes import FAMILIES, POLICIES, Seen, Shape, shapes
from vllm_sched.sim.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_sched.bench.goodput import Targets
    from vllm_sched.bench.traffic.types import Source
    from vllm_sched.sim.types import WorkerModel

SAME: Final = 0.04  # rates this close are equal
COARSE, FINE = 1.12, 1.03  # how near the two sides of a rate come
# A run has at least so many requests, and lasts so many times the target for a first token: a queue
# that grows by a tenth of that time would be taken for none in a shorter one.
COARSE_REQUESTS, FINE_REQUESTS = 1000, 2000
COARSE_LASTS, FINE_LASTS = 20.0, 25.0
LEAST_TTFT_S: Final = 3.0
# But no more than so many, a large fleet is steadier and plans are waited for, unless it would last
# so few times that target: what is served within it whenever it comes would be served at any rate.
COARSE_MOST, FINE_MOST = 5_000, 15_000
LEAST_LASTS: Final = 4.0
WARM: Final = 0.2  # of a run, in which it fills up: not counted
# Nor is a rate served at which the queue grows, by so many seconds a second: in the end it would be
# longer than any target, or never end where none is for it.
GROWS, GROWS_BRIEFLY = 0.04, 0.1
FINALISTS: Final = 3  # of each family
SAMPLE: Final = 4000  # requests that the traffic is known by; a trace by all that are kept of it
QUANTILES: Final = (0.5, 0.75, 0.9, 0.97)
DOUBLINGS: Final = 24
BORNE: Final = 4.0
LONGEST: Final = 0.9  # the share of prompts that are not among the longest
REST, LONG = "rest", "long"
IDLE: Final = 0.02  # of what computing allows: a worker that has nothing else to do
Tell = Callable[[str, float], None]  # what is being done, and how much of all is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned for."""

    source: Source
    machine: WorkerModel
    targets: Targets
    burstiness: float | None = None
    scale: float = 1.0
    prefix_hit: float | None = None
    seed: int = 0
    policies: tuple[str, ...] = POLICIES
    families: tuple[str, ...] = FAMILIES
    share: float = SHARE
    effort: float = 1.0  # requests in each run, against the usual

    def __post_init__(self) -> None:
        """Take a trace from all over the file, and without end."""
        source = without_end(self.source, random.Random(self.seed))
        object.__setattr__(self, "source", source)

    def schedule(self, rate: float, count: int) -> Schedule:
        """Make requests at a rate."""
        return Schedule(
            source=self.source,
            rate=rate,
            burstiness=self.burstiness,
            count=count,
            duration_s=2 * count / rate + 1,
            seed=self.seed,
            scale=self.scale,
            prefix_hit=self.prefix_hit,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """A fleet, and the rate that it serves."""

    shape: Shape
    rate: float
    run: Run  # at that rate


class Search:
    """Searches, with the same requests for every fleet."""

    def __init__(self, question: Question, tell: Tell = lambda _what, _share: None) -> None:
        self.question = question
        source = question.source
        some = max(SAMPLE, source.held) if isinstance(source, Sampled) else SAMPLE
        self._unknown = replace(question.schedule(1.0, some), count=None).shapes()
        sample = list(islice(self._unknown, some))
        if not sample:
            raise UsageError(f"{source.name}: there is no request in it to plan for")
        self.traffic = Traffic.of(sample, question.machine)
        self.runs = 0
        self._told, self._done = tell, 0.0
        self._start = self._by_hand()
        prompts = self.traffic.prompts
        self._longest = prompts[int(LONGEST * (len(prompts) - 1))]
        self._known = [self._classed(each) for each in sample]
        machine = question.machine

        @lru_cache(maxsize=65_536)
        def borne_s(prompt: int) -> float:
            alone = capacity.prefill_seconds(machine.time, prompt, machine.max_num_batched_tokens)
            return BORNE * alone

        self.borne_s = borne_s

    def _by_hand(self) -> float:
        machine, traffic = self.question.machine, self.traffic
        return capacity.Capacity.of(machine, traffic.prompt, traffic.output).requests_per_s

    def tell(self, what: str, share: float) -> None:
        """Say what is done now, and how much of all that was asked for is."""
        self._done = share
        self._told(what, share)

    # One fleet

    def count(self, rate: float, *, fine: bool) -> int:
        """How many requests a run has."""
        question = self.question
        target = max(question.targets.ttft or 0.0, LEAST_TTFT_S)
        lasts = (FINE_LASTS if fine else COARSE_LASTS) * target
        least, most = (FINE_REQUESTS, FINE_MOST) if fine else (COARSE_REQUESTS, COARSE_MOST)
        most = max(most, math.ceil(rate * LEAST_LASTS * target))
        return max(round(min(max(rate * lasts, least), most) * question.effort), 50)

    def play(self, shape: Shape, rate: float, *, fine: bool, whole: bool = False) -> Run:
        """Play a fleet at a rate; unless the `whole` is asked for, a failed run not to its end."""
        question = self.question
        total = self.count(rate, fine=fine)
        # Of a large fleet one run takes long.
        self._told(f"{shape}: {total:,} requests", self._done)
        requests = self._requests(question.schedule(rate, total))
        flow = Flow(
            shape.placed(question.machine), shape.settings(), question.targets, self.borne_s
        )
        self.runs += 1
        warm = int(WARM * total)
        if whole:
            return flow.play(requests, warm=warm)
        longs = sum(each.klass == LONG for each in requests[warm:])
        most_late = (1 - question.share) * (total - warm) + 1
        most_lost = (1 - self._least_kept(longs, fine=fine)) * longs + 1
        return flow.play(requests, warm=warm, most_late=most_late, most_lost={LONG: most_lost})

    def _requests(self, schedule: Schedule) -> list[Request]:
        """Give a schedule's requests: drawn once, at whatever rate, the longest told apart."""
        moments, known = schedule.moments(), self._known
        more = islice(self._unknown, max(len(moments) - len(known), 0))
        known += [self._classed(each) for each in more]
        return [
            Request(
                at, each.klass, each.prompt_tokens, each.output_tokens, each.tenant, each.shared
            )
            for at, each in zip(moments, known, strict=False)
        ]

    def _classed(self, request: Request) -> Request:
        return replace(request, klass=self.class_of(request.prompt_tokens))

    def class_of(self, prompt: int) -> str:
        """Say whether a prompt is among the longest."""
        return LONG if prompt > self._longest else REST

    def enough(self, run: Run, *, fine: bool = True, brief: bool = False) -> bool:
        """Whether enough were in time, and of the longest not too late, and no queue grew.

        In a coarse run there are few of the longest: what may be chance is left to a fine one. A
        brief one, with real schedulers, says less of queues.
        """
        if run.failed or run.growth > (GROWS_BRIEFLY if brief else GROWS):
            return False
        longs = run.classes.get(LONG)
        least = self._least_kept(longs.arrived if longs else 0, fine=fine)
        return run.all.share >= self.question.share and longest_kept(run) >= least

    def _least_kept(self, longs: int, *, fine: bool) -> float:
        """Return the share of so many of the longest that may not be too late."""
        share = self.question.share
        return share if fine or not longs else share - math.sqrt(share * (1 - share) / longs)

    def serves(self, shape: Shape, rate: float, *, fine: bool) -> Run | None:
        """Play it; None if too few were in time."""
        run = self.play(shape, rate, fine=fine)
        return run if self.enough(run, fine=fine) else None

    def rate_of(
        self, shape: Shape, start: float, *, fine: bool = False, least: float = 0.0
    ) -> Served | None:
        """Find the rate that it serves; None if that is not even the least.

        What its computing allows it never exceeds: a run that ends before a queue is felt would.
        """
        near = FINE if fine else COARSE
        most = shape.workers * self.traffic.most_each
        if least > most:
            return None
        best: Run | None = None
        low, high = 0.0, math.inf
        rate = min(max(start, least), most)
        for _ in range(DOUBLINGS):
            if (run := self.serves(shape, rate, fine=fine)) is not None:
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
        while high / low > near and high < math.inf:
            rate = math.sqrt(low * high)
            if (run := self.serves(shape, rate, fine=fine)) is not None:
                best, low = run, rate
            else:
                high = rate
        return Served(shape, low, best)

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
        run = self.play(Shape(general=1), self._start * IDLE, fine=False, whole=True)
        if run.all.share >= question.share:
            return
        raise UsageError(self._hopeless(run))

    def _hopeless(self, run: Run) -> str:
        question, figures = self.question, run.all
        share = question.share
        named = {"ttft": figures.ttft, "tpot": figures.tpot, "itl": figures.longest}
        missed = [
            f"{name}:{_up(sketch.quantile(share) * 1000)}"
            for name, sketch in named.items()
            if (target := getattr(question.targets, name)) is not None
            and sketch.quantile(share) > target
        ]
        wanted = " ".join(missed) or "looser targets"
        return (
            f"--goodput: no number of {question.machine.profile} meets it: on an idle worker "
            f"{figures.share:.0%} of {question.source.name} are in time, and {share:.0%} should "
            f"be; ask for {wanted} at the least"
        )

    def seen(self) -> Seen:
        """See what fleets are worth a try."""
        traffic, machine = self.traffic, self.question.machine
        time = machine.time
        largest = traffic.totals[-1]
        boundaries: dict[int, float] = {}
        for share in QUANTILES:
            limit = _round(traffic.totals[int(share * (len(traffic.totals) - 1))])
            if traffic.totals[0] <= limit < min(largest, machine.max_model_len):
                boundaries[limit] = traffic.above(limit)
        prefill = capacity.prefill_work(time, traffic.prompt, machine.max_num_batched_tokens)
        steps = max(traffic.output - 1, 0)
        # An answer's steps are shared by a few tens of others.
        decode = steps * (
            time.decode_s + time.context_s * traffic.prompt + time.decode_fixed_s / 32
        )
        whole = prefill + decode
        return Seen(boundaries=boundaries, prefill_share=prefill / whole if whole else 0.5)

    def family(self, family: str, workers: int, share: tuple[float, float]) -> list[Served]:
        """Find the best of a family, best first; `share` says from where to where all is done."""
        question, seen = self.question, self.seen()
        itl_ms = self._itl_ms()
        tried = list(shapes(family, workers, seen, question.policies, itl_ms))
        found: list[Served] = []
        start = self._start * workers * 0.5
        for at, shape in enumerate(tried):
            done = share[0] + (share[1] - share[0]) * at / max(len(tried), 1)
            self.tell(str(shape), done)
            best = max((each.rate for each in found), default=0.0)
            least = best * (1 - SAME)
            served = self.rate_of(shape, least or start, least=least)
            if served is not None:
                found.append(served)
        found.sort(key=lambda each: -each.rate)
        fine = [
            again
            for each in found[:FINALISTS]
            if (
                again := self.rate_of(each.shape, each.rate, fine=True)
            ) is not None
        ]  # fmt: skip
        return ordered([*fine, *(again for each in fine[:1] for again in self._thresholds(each))])

    def _thresholds(self, served: Served) -> Iterator[Served]:
        """Try fixed thresholds for hand-overs, where the router's own was good."""
        if not served.shape.prefill:
            return
        half = self.traffic.prompts[len(self.traffic.prompts) // 2]
        for above in sorted({1, half}):
            shape = replace(served.shape, disaggregate_above=above)
            least = served.rate * (1 + SAME)
            if (better := self.rate_of(shape, least, fine=True, least=least)) is not None:
                yield better

    def _itl_ms(self) -> int:
        """Choose the gap that chunks are made for: what is asked of the slowest of them."""
        targets = self.question.targets
        wanted = targets.itl or targets.tpot
        return 100 if wanted is None else max(round(wanted * 1000), 1)

    def best(self, workers: int, share: tuple[float, float] = (0.0, 1.0)) -> list[Served]:
        """Find the best of every family, best first."""
        families = self.question.families
        width = (share[1] - share[0]) / len(families)
        found = []
        for at, family in enumerate(families):
            start = share[0] + at * width
            found += self.family(family, workers, (start, start + width))[:1]
        return ordered(found)

    def resized(self, served: Served, workers: int) -> Served | None:
        """Find what a fleet of that kind and policy serves with more workers, or fewer."""
        if workers < (1 if served.shape.general else 2):
            return None
        shape, seen = served.shape, self.seen()
        limit = shape.short_limit
        if limit in seen.boundaries:
            seen = replace(seen, boundaries={limit: seen.boundaries[limit]})
        tried = [
            replace(each, disaggregate_above=shape.disaggregate_above)
            for each in shapes(shape.family, workers, seen, (shape.policy,), shape.itl_ms)
        ]
        start = served.rate * workers / shape.workers
        found: list[Served] = []
        for each in tried:
            best = max((one.rate for one in found), default=0.0)
            one = self.rate_of(each, max(start, best), fine=True, least=best)
            if one is not None:
                found.append(one)
        return max(found, key=lambda one: one.rate, default=None)


def longest_kept(run: Run) -> float:
    """Return the share of the longest that were in time, or as late as may be borne."""
    longs = run.classes.get(LONG)
    return 1.0 if longs is None else longs.kept_share


def ordered(found: list[Served]) -> list[Served]:
    """Put the best first; of equals the simplest."""
    left, best_first = list(found), list[Served]()
    while left:
        most = max(each.rate for each in left)
        equal = [each for each in left if each.rate >= most * (1 - SAME)]
        first = min(equal, key=_plainness)
        left.remove(first)
        best_first.append(first)
    return best_first


def _plainness(served: Served) -> tuple[int, int, float]:
    shape = served.shape
    return FAMILIES.index(shape.family), POLICIES.index(shape.policy), -served.rate


def _round(tokens: int) -> int:
    """To two digits: somebody reads it."""
    return int(float(f"{tokens:.2g}"))


def _up(milliseconds: float) -> int:
    """To two digits, upwards."""
    digits: int = 10 ** max(math.floor(math.log10(max(milliseconds, 1.0))) - 1, 0)
    return math.ceil(milliseconds / digits) * digits

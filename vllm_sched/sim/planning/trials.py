"""Simulated runs of fleets at a rate, and whether a run meets the targets.

No prompt may starve: the same share of the longest tenth of the prompts must be in time, or have a
first token within `TOLERATED_TTFT_RATIO` times the time on an idle worker.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from vllm_sched.bench.traffic.sampled import Sampled
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.kv_blocks import CachedPrefixes
from vllm_sched.sim.fleet.aggregate_flow import AggregateFlow
from vllm_sched.sim.fleet.figures import FlowResult
from vllm_sched.sim.planning import capacity_bound
from vllm_sched.sim.planning.capacity_bound import least_seconds
from vllm_sched.sim.planning.capacity_search import DrawnRequests
from vllm_sched.sim.planning.fleet_shapes import FleetShape
from vllm_sched.sim.planning.question import PlanQuestion
from vllm_sched.sim.types import WorkerModel

MIN_REQUESTS: Final = 50  # with a small effort
MIN_TTFT_S: Final = 3.0
# A run has more than `max_requests` if it would be shorter than this number of TTFT targets.
MIN_TTFTS: Final = 4.0
WARM_SHARE: Final = 0.2  # share of a run that fills the fleet and is not counted
# Most growth of the time to first token, in seconds per second.
MAX_GROWTH, MAX_BRIEF_GROWTH = 0.04, 0.1
SAMPLE_REQUESTS: Final = 4000  # requests for the traffic statistics; a trace uses all kept lines
TOLERATED_TTFT_RATIO: Final = 4.0
LONG_QUANTILE: Final = 0.9  # share of prompts that are not among the longest
REST, LONG = "rest", "long"
IDLE_LOAD: Final = 0.02  # load of an idle worker, as a share of the compute bound
UNLIMITED_TOKENS: Final = 1 << 60


class RunSize(NamedTuple):
    """The size of a run: shorter ones hide a growing queue."""

    min_requests: int
    max_requests: int
    ttfts: float  # length in TTFT targets


COARSE: Final = RunSize(1000, 5_000, ttfts=20.0)
FINE: Final = RunSize(4800, 8_000, ttfts=25.0)


@dataclass(frozen=True, slots=True)
class TrafficStats:
    prompt: float  # mean
    output: float  # mean
    prompts: tuple[int, ...]  # sorted
    totals: tuple[int, ...]  # prompt + output, sorted
    max_worker_rate: float  # requests/s that one worker can compute with a perfect cache

    @classmethod
    def from_sample(cls, sample: Sequence[Request], *machines: WorkerModel) -> TrafficStats:
        totals = sorted(request.prompt_tokens + request.output_tokens for request in sample)
        cached = any(machine.prefix_caching for machine in machines)
        cache = CachedPrefixes(UNLIMITED_TOKENS if cached else 0)
        sizes = [_sizes(request, cache) for request in sample]
        seconds = min(least_seconds(machine, sizes) for machine in machines)
        return cls(
            sum(request.prompt_tokens for request in sample) / len(sample),
            sum(request.output_tokens for request in sample) / len(sample),
            tuple(sorted(request.prompt_tokens for request in sample)),
            tuple(totals),
            len(sample) / seconds if seconds > 0 else math.inf,
        )

    def above(self, limit: int) -> float:
        """Return the share of all tokens that belongs to requests above `limit`."""
        at = bisect_left(self.totals, limit + 1)
        return sum(self.totals[at:]) / (sum(self.totals) or 1)


def _sizes(request: Request, cache: CachedPrefixes) -> tuple[int, int, int]:
    held = min(cache.count_cached(request.shared), request.prompt_tokens - 1)
    cache.store(request.shared, UNLIMITED_TOKENS)
    return request.prompt_tokens, request.output_tokens, held


class FleetTrials:
    def __init__(self, question: PlanQuestion, note: Callable[[str], None]) -> None:
        self.question = question
        source, machine = question.source, question.machine
        prompt_machine = question.prompt_machine
        held = source.held if isinstance(source, Sampled) else 0
        sample = list(islice(question.shapes(), max(SAMPLE_REQUESTS, held)))
        self.traffic = traffic = TrafficStats.from_sample(sample, *filter(None, question.machines))
        self.runs = 0
        # Requests/s of one worker, in closed form.
        self.worker_rate = capacity_bound.Capacity.from_model(
            machine, traffic.prompt, traffic.output
        ).requests_per_s
        self._note = note
        self._long_above = _long_above(traffic.prompts)
        self._drawn: dict[int, DrawnRequests] = {}

        @lru_cache(maxsize=65_536)
        def tolerated_ttft_s(prompt: int) -> float:
            alone = capacity_bound.prefill_seconds(
                prompt_machine.time, prompt, prompt_machine.max_num_batched_tokens
            )
            return TOLERATED_TTFT_RATIO * alone

        self.tolerated_ttft_s = tolerated_ttft_s

    def count(self, rate: float, *, fine: bool) -> int:
        size = FINE if fine else COARSE
        ttft_s = max(self.question.targets.ttft or 0.0, MIN_TTFT_S)
        most = max(size.max_requests, math.ceil(rate * MIN_TTFTS * ttft_s))
        requests = min(max(rate * (size.ttfts * ttft_s), size.min_requests), most)
        return max(round(requests * self.question.effort), MIN_REQUESTS)

    def judging_draws(self) -> list[int]:
        """Return the draws that judge fleets, by falling work; draw 0 is for the rough search."""
        draws, count = range(1, self.question.draws + 1), self.count(0.0, fine=True)
        return sorted(draws, key=lambda draw: -self._requests(draw).prompt_tokens(count))

    def play(
        self, shape: FleetShape, rate: float, *, fine: bool, whole: bool = False, draw: int = 0
    ) -> FlowResult:
        """Play a fleet at a rate; a failed run stops early, unless `whole`."""
        question = self.question
        total = self.count(rate, fine=fine)
        self._note(f"{shape}: {total:,} requests")
        requests = self._requests(draw).requests_at(question.schedule(rate, total, draw).moments())
        flow = self._flow(shape)
        self.runs += 1
        warm = int(WARM_SHARE * total)
        if whole:
            return flow.play(requests, warm=warm)
        longs = sum(request.klass == LONG for request in requests[warm:])
        max_late = (1 - question.share) * (total - warm) + 1
        max_lost = (1 - self._least_kept(longs)) * longs + 1
        return flow.play(requests, warm=warm, max_late=max_late, max_lost={LONG: max_lost})

    def _flow(self, shape: FleetShape) -> AggregateFlow:
        workers = shape.place_workers(*self.question.machines)
        return AggregateFlow(
            workers, shape.settings(), self.question.targets, self.tolerated_ttft_s
        )

    def _requests(self, draw: int) -> DrawnRequests:
        if draw not in self._drawn:
            self._drawn[draw] = DrawnRequests(self.question.shapes(draw), self.class_of)
        return self._drawn[draw]

    def class_of(self, prompt: int) -> str:
        return LONG if prompt > self._long_above else REST

    def is_good_enough(self, run: FlowResult, *, strict: bool = True, brief: bool = False) -> bool:
        """Return True if enough requests are in time, also of the longest, and no queue grows.

        Unless `strict`, the longest prompts get one standard deviation. `brief` runs may show more
        queue growth.
        """
        if run.failed or run.growth > (MAX_BRIEF_GROWTH if brief else MAX_GROWTH):
            return False
        share, longs = self.question.share, run.classes.get(LONG)
        of_longest = share if strict else self._least_kept(longs.arrived if longs else 0)
        return run.all.share >= share and longest_kept(run) >= of_longest

    def _least_kept(self, longs: int) -> float:
        share = self.question.share
        return share - math.sqrt(share * (1 - share) / longs) if longs else share

    def serves(
        self, shape: FleetShape, rate: float, draw: int = 0, *, fine: bool = False
    ) -> FlowResult | None:
        run = self.play(shape, rate, fine=fine, draw=draw)
        return run if self.is_good_enough(run, strict=False) else None

    def play_idle(self) -> FlowResult:
        """Play a draw on an idle worker, at even gaps: bursts are a matter of fleet size."""
        rate = min(self.worker_rate, self.traffic.max_worker_rate) * IDLE_LOAD
        total = self.count(rate, fine=True)
        requests = self._requests(1).requests_at([at / rate for at in range(1, total + 1)])
        self.runs += 1
        split = self.question.prefill_machine is not None
        shape = FleetShape(prefill=1, decode=1) if split else FleetShape(general=1)
        return self._flow(shape).play(requests)


def _long_above(prompts: Sequence[int]) -> int:
    """Return the length above which a prompt is among the longest tenth.

    If more than a tenth have the greatest length, all of these are; with one length, none is.
    """
    at = int(LONG_QUANTILE * (len(prompts) - 1))
    if prompts[at] == prompts[-1]:
        at = max(bisect_left(prompts, prompts[-1]) - 1, 0)
    return prompts[at]


def longest_kept(run: FlowResult) -> float:
    longs = run.classes.get(LONG)
    return 1.0 if longs is None else longs.kept_share


def check_feasible(trials: FleetTrials) -> None:
    """Raise a `UsageError` if no fleet of any size can meet the targets."""
    question, traffic = trials.question, trials.traffic
    limit = question.machine.max_model_len
    fitting = bisect_left(traffic.totals, limit + 1) / len(traffic.totals)
    if fitting < question.share:
        raise UsageError(
            f"{question.source.name}: {1 - fitting:.0%} of the requests are longer than the "
            f"{limit:,} tokens that a worker of {question.profiles} holds; use a "
            "larger machine or a --scale below 1"
        )
    run = trials.play_idle()
    if not trials.is_good_enough(run, strict=False):
        raise UsageError(_infeasible(trials.question, run))


def _infeasible(question: PlanQuestion, run: FlowResult) -> str:
    share = question.share
    subject, met, figures = question.source.name, run.all.share, run.all
    named = {
        "ttft": figures.ttft, "tpot": figures.tpot, "itl": figures.longest,
        "e2el": figures.e2el,
    }  # fmt: skip
    if met >= share and (longs := run.classes.get(LONG)) is not None:
        # First tokens and ends of long prompts may be late, so the gaps are too long.
        subject, met = f"the longest of {subject}", longs.kept_share
        named = {"tpot": longs.tpot, "itl": longs.longest}
    missed = [
        f"{name}:{_round_up(sketch.quantile(share) * 1000)}"
        for name, sketch in named.items()
        if (target := getattr(question.targets, name)) is not None
        and sketch.quantile(share) > target
    ]
    # Each target may be met, but not all together.
    wanted = f"{' '.join(missed)} at the least" if missed else "looser targets"
    return (
        f"--goodput: no number of {question.profiles} meets it: on an idle worker "
        f"{math.floor(100 * met)}% of {subject} are in time, and {share:.0%} should be; "
        f"ask for {wanted}"
    )


def _round_up(milliseconds: float) -> int:
    digits: int = 10 ** max(math.floor(math.log10(max(milliseconds, 1.0))) - 1, 0)
    return math.ceil(milliseconds / digits) * digits

"""The rate that a fleet serves with every one of several random draws of the requests.

One draw is noisy: if 2 % of the prompts make a third of the work, samples of some thousand requests
differ by a tenth. So K new draws, the same for all fleets, decide. The result is the highest rung
of a ladder of rates at which every draw has enough requests in time; a further draw then has enough
with a probability of about K / (K + 1).

Cost: the draw that failed last runs first, so a rate that is too high takes one short run. How it
fails: with few requests or draws, a rung may pass by luck. Draws of a trace share its lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.figures import FlowResult, merge_results
from vllm_sched.sim.planning.fleet_shapes import FleetShape

RUNG_RATIO: Final = 1.03  # ratio of neighboring rungs
MIN_RATE, MAX_RATE = 1e-4, 1e12  # requests/s


class DrawnRequests:
    def __init__(self, requests: Iterable[Request], class_of: Callable[[int], str]) -> None:
        self._rest, self._class_of = iter(requests), class_of
        self._drawn: list[Request] = []

    def prompt_tokens(self, count: int) -> int:
        """Return the prompt tokens of the first `count` requests."""
        self._draw_until(count)
        return sum(request.prompt_tokens for request in self._drawn[:count])

    def requests_at(self, moments: Sequence[float]) -> list[Request]:
        self._draw_until(len(moments))
        class_of = self._class_of
        return [
            Request(
                at, class_of(request.prompt_tokens), request.prompt_tokens, request.output_tokens,
                request.tenant, request.shared,
            )
            for at, request in zip(moments, self._drawn, strict=False)
        ]  # fmt: skip

    def _draw_until(self, count: int) -> None:
        self._drawn += islice(self._rest, max(count - len(self._drawn), 0))


@dataclass(frozen=True, slots=True)
class CapacityVerdict:
    rate: float
    runs: list[FlowResult]  # by draw
    run: FlowResult  # all draws


class CapacitySearch:
    """The search; `play` returns None if too few requests of a draw are in time."""

    def __init__(
        self,
        draws: Sequence[int],
        play: Callable[[FleetShape, float, int], FlowResult | None],
        enough: Callable[[FlowResult], bool],
    ) -> None:
        self._order = list(draws)  # the likeliest to fail comes first
        self._margins: dict[int, float] = {}  # by draw, at its last success
        self._play, self._enough = play, enough
        self._played: dict[tuple[FleetShape, int, int], FlowResult | None] = {}

    def highest(
        self,
        shape: FleetShape,
        start: float,
        *,
        min_rate: float = 0.0,
        max_rate: float = math.inf,
        draws: int | None = None,
    ) -> CapacityVerdict | None:
        """Return the highest rate, searched from `start`; None if below `min_rate`.

        `draws`: only by this many draws, the last to fail.
        """
        bottom, top = _rung_of(max(min_rate, MIN_RATE)), _rung_of(min(max_rate, MAX_RATE))
        while rate_at(top) > max_rate:
            top -= 1
        if top < bottom:
            return None
        begin = min(max(_rung_of(max(start, MIN_RATE)), bottom), top)
        rung = self._highest_of_likeliest(shape, begin, bottom, top)
        while rung is not None:
            if (verdict := self._verdict_at(shape, rung, draws)) is not None:
                return verdict
            rung = self._highest_of_likeliest(shape, rung - 1, bottom, rung - 1)
        return None

    def _played_at(self, shape: FleetShape, rung: int, draw: int) -> FlowResult | None:
        key = shape, rung, draw
        if key not in self._played:
            self._played[key] = self._play(shape, rate_at(rung), draw)
        return self._played[key]

    def _highest_of_likeliest(
        self, shape: FleetShape, begin: int, bottom: int, top: int
    ) -> int | None:
        """Return the highest rung for the draw that failed last; None if below `bottom`."""
        if begin < bottom:
            return None
        likeliest = self._order[0]
        rung, failed, stride = begin, top + 1, 1
        while self._played_at(shape, rung, likeliest) is None:
            if rung == bottom:
                return None
            failed, rung, stride = rung, max(rung - stride, bottom), 2 * stride
        while rung >= begin and rung + stride < failed:
            if self._played_at(shape, rung + stride, likeliest) is None:
                failed = rung + stride
            else:
                rung, stride = rung + stride, 2 * stride
        while failed - rung > 1 and failed <= top:
            middle = (rung + failed) // 2
            if self._played_at(shape, middle, likeliest) is None:
                failed = middle
            else:
                rung = middle
        return rung

    def _verdict_at(
        self, shape: FleetShape, rung: int, draws: int | None
    ) -> CapacityVerdict | None:
        runs: list[FlowResult] = []
        # The draw with the smallest margin is the most likely to fail.
        self._order[1:] = sorted(self._order[1:], key=lambda draw: self._margins.get(draw, 0.0))
        for draw in self._order[:draws]:
            run = self._played_at(shape, rung, draw)
            if run is None:
                self._order.remove(draw)
                self._order.insert(0, draw)
                return None
            self._margins[draw] = _margin(run)
            runs.append(run)
        merged = merge_results(runs)
        # A few draws have too few long prompts for the stricter check.
        enough = draws is not None or self._enough(merged)
        return CapacityVerdict(rate_at(rung), runs, merged) if enough else None


def _margin(run: FlowResult) -> float:
    return min(run.all.share, *(figures.kept_share for figures in run.classes.values()), 1.0)


def _rung_of(rate: float) -> int:
    """Return the lowest rung with at least this rate."""
    rung = math.ceil(math.log(rate) / math.log(RUNG_RATIO))
    return rung - 1 if rate_at(rung - 1) >= rate else rung


def rate_at(rung: int) -> float:
    return float(f"{RUNG_RATIO**rung:.3g}")

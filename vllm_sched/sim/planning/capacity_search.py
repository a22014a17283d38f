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
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.figures import FlowResult, merge_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_sched.sim.planning.fleet_shapes import FleetShape

RUNG_RATIO: Final = 1.03  # ratio of neighboring rungs
MIN_RATE, MAX_RATE = 1e-4, 1e12  # requests/s


class DrawnRequests:
    def __init__(self, requests: Iterable[Request], class_of: Callable[[int], str]) -> None:
        self._unknown, self._class_of = iter(requests), class_of
        self._known: list[Request] = []

    def requests_at(self, moments: Sequence[float]) -> list[Request]:
        known, class_of = self._known, self._class_of
        known += islice(self._unknown, max(len(moments) - len(known), 0))
        return [
            Request(
                at, class_of(each.prompt_tokens), each.prompt_tokens, each.output_tokens,
                each.tenant, each.shared,
            )
            for at, each in zip(moments, known, strict=False)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CapacityVerdict:
    rate: float
    runs: list[FlowResult]  # by draw
    run: FlowResult  # all draws


class CapacitySearch:
    """The search; `play` returns None if too few requests of a draw are in time."""

    def __init__(
        self,
        draws: int,
        play: Callable[[FleetShape, float, int], FlowResult | None],
        enough: Callable[[FlowResult], bool],
    ) -> None:
        self._order = list(range(1, draws + 1))  # draw 0 is for the rough search
        self._margins: dict[int, float] = {}  # by draw, at its last success
        self._play, self._enough = play, enough

    def highest(
        self,
        shape: FleetShape,
        start: float,
        *,
        least: float = 0.0,
        most: float = math.inf,
        hardest: bool = False,
    ) -> CapacityVerdict | None:
        """Return the highest rate, searched from `start`; None if below `least`.

        `hardest`: only by the draw that failed last, of any fleet.
        """
        bottom, top = _rate_step(max(least, MIN_RATE)), _rate_step(min(most, MAX_RATE))
        while rate_at(top) > most:
            top -= 1
        if top < bottom:
            return None
        played: dict[tuple[int, int], FlowResult | None] = {}

        def play(rung: int, draw: int) -> FlowResult | None:
            if (rung, draw) not in played:
                played[rung, draw] = self._play(shape, rate_at(rung), draw)
            return played[rung, draw]

        begin = min(max(_rate_step(max(start, MIN_RATE)), bottom), top)
        if begin == bottom and not hardest and self._verdict_at(bottom, play) is None:
            return None
        rung = self._highest_of_first(begin, bottom, top, play)
        while rung is not None:
            if hardest and (run := play(rung, self._order[0])) is not None:
                return CapacityVerdict(rate_at(rung), [run], run)
            if (verdict := self._verdict_at(rung, play)) is not None:
                return verdict
            rung = self._highest_of_first(rung - 1, bottom, rung - 1, play)
        return None

    def _highest_of_first(
        self, begin: int, bottom: int, top: int, play: Callable[[int, int], FlowResult | None]
    ) -> int | None:
        """Return the highest rung for the draw that failed last; None if below `bottom`."""
        if begin < bottom:
            return None
        first = self._order[0]
        rung, failed, stride = begin, top + 1, 1
        while play(rung, first) is None:
            if rung == bottom:
                return None
            failed, rung, stride = rung, max(rung - stride, bottom), 2 * stride
        while rung >= begin and rung + stride < failed:
            if play(rung + stride, first) is None:
                failed = rung + stride
            else:
                rung, stride = rung + stride, 2 * stride
        while failed - rung > 1 and failed <= top:
            middle = (rung + failed) // 2
            rung, failed = (rung, middle) if play(middle, first) is None else (middle, failed)
        return rung

    def _verdict_at(
        self, rung: int, play: Callable[[int, int], FlowResult | None]
    ) -> CapacityVerdict | None:
        runs: list[FlowResult] = []
        # The draw with the smallest margin is the most likely to fail.
        self._order[1:] = sorted(self._order[1:], key=lambda draw: self._margins.get(draw, 0.0))
        for draw in tuple(self._order):
            run = play(rung, draw)
            if run is None:
                self._order.remove(draw)
                self._order.insert(0, draw)
                return None
            self._margins[draw] = _margin(run)
            runs.append(run)
        whole = merge_results(runs)
        return CapacityVerdict(rate_at(rung), runs, whole) if self._enough(whole) else None


def _margin(run: FlowResult) -> float:
    return min(run.all.share, *(each.kept_share for each in run.classes.values()), 1.0)


def _rate_step(rate: float) -> int:
    rung = math.ceil(math.log(rate) / math.log(RUNG_RATIO))
    return rung - 1 if rate_at(rung - 1) >= rate else rung


def rate_at(rung: int) -> float:
    return float(f"{RUNG_RATIO**rung:.3g}")

"""The rate that a fleet serves whatever is drawn: of several draws each must have enough in time.

One draw of the requests says little of a rate. Where one prompt in fifty makes a third of the work,
some thousands of them weigh a tenth more or less than as many others, and it matters who comes
beside whom: the share in time of one draw goes up and down with the rate, and the highest rate that
one has is its luck. Of many fleets the best by that draw is the one that it favours.

So the last word have draws that nothing was chosen by, the same for all fleets. The rate is the
first of a ladder, from above, at which every one of them has enough; as a further draw is no more
likely than those to be the worst of all, it has so with a chance of about K in K + 1 for K draws.

Cost: where to begin on the ladder is found with one draw, that which failed last; so a rate that is
too high takes one run, cut short, and few but the one that is named take all. How it fails: of few
requests, or few draws, what all bear goes up and down from rung to rung, and one may hold by luck.
Draws of a trace share its lines, with what was searched too: they tell of chance in when and beside
whom those come, and nothing of another day's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.aggregate_flow import FlowResult, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_sched.sim.planning.fleet_shapes import FleetShape

STEP: Final = 1.03  # from rung to rung
LEAST, MOST = 1e-4, 1e12  # requests a second that anybody asks for


class DrawnRequests:
    """Requests of one seed: drawn once, and played at whatever rate."""

    def __init__(self, requests: Iterable[Request], class_of: Callable[[int], str]) -> None:
        self._unknown, self._class_of = iter(requests), class_of
        self._known: list[Request] = []

    def at(self, moments: Sequence[float]) -> list[Request]:
        """Give as many as there are times, at those; of what class one is its prompt says."""
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
    """What all draws bear."""

    rate: float
    runs: list[FlowResult]  # one of each draw
    run: FlowResult  # all of them


class CapacitySearch:
    """See the module's text.

    `play` plays a fleet at a rate with the requests of a draw, and returns None where too few were
    in time; `enough` is asked of all draws together.
    """

    def __init__(
        self,
        draws: int,
        play: Callable[[FleetShape, float, int], FlowResult | None],
        enough: Callable[[FlowResult], bool],
    ) -> None:
        self._order = list(range(1, draws + 1))  # draw 0 is what was searched with
        self._margins: dict[int, float] = {}  # of each, when it last had enough
        self._play, self._enough = play, enough

    def highest(
        self, shape: FleetShape, start: float, *, least: float = 0.0, most: float = math.inf
    ) -> CapacityVerdict | None:
        """Find the rate, from `start` on down, or up where that holds; None if below the least."""
        bottom, top = _rung(max(least, LEAST)), _rung(min(most, MOST))
        while rate_at(top) > most:
            top -= 1
        if top < bottom:
            return None
        played: dict[tuple[int, int], FlowResult | None] = {}

        def play(rung: int, draw: int) -> FlowResult | None:
            if (rung, draw) not in played:
                played[rung, draw] = self._play(shape, rate_at(rung), draw)
            return played[rung, draw]

        first, begin = self._order[0], min(max(_rung(max(start, LEAST)), bottom), top)
        rung, failed, stride = begin, top + 1, 1
        while play(rung, first) is None:
            if rung == bottom:
                return None
            failed, rung, stride = rung, max(rung - stride, bottom), 2 * stride
        while rung < begin and failed - rung > 1:
            middle = (rung + failed) // 2
            rung, failed = (rung, middle) if play(middle, first) is None else (middle, failed)
        return self._from(rung, bottom, failed - 1, play)

    def _from(
        self, rung: int, bottom: int, top: int, play: Callable[[int, int], FlowResult | None]
    ) -> CapacityVerdict | None:
        """Go down until all hold; or up, if they do where it begins."""
        found: CapacityVerdict | None = None
        while bottom <= rung <= top:
            if (verdict := self._at(rung, play)) is not None:
                found, rung = verdict, rung + 1
            elif found is not None:
                break
            else:
                top = rung = rung - 1
        return found

    def _at(
        self, rung: int, play: Callable[[int, int], FlowResult | None]
    ) -> CapacityVerdict | None:
        runs: list[FlowResult] = []
        # Who had least to spare is next to fail: the others need not be played for nothing.
        self._order[1:] = sorted(self._order[1:], key=lambda draw: self._margins.get(draw, 0.0))
        for draw in tuple(self._order):
            run = play(rung, draw)
            if run is None:
                self._order.remove(draw)
                self._order.insert(0, draw)
                return None
            self._margins[draw] = _margin(run)
            runs.append(run)
        whole = together(runs)
        return CapacityVerdict(rate_at(rung), runs, whole) if self._enough(whole) else None


def _margin(run: FlowResult) -> float:
    """Return the least share of a run: in time of all, or not too late of a class."""
    return min(run.all.share, *(each.kept_share for each in run.classes.values()), 1.0)


def _rung(rate: float) -> int:
    """Return that of a rate, or the next one above it."""
    rung = math.ceil(math.log(rate) / math.log(STEP))
    return rung - 1 if rate_at(rung - 1) >= rate else rung


def rate_at(rung: int) -> float:
    """Give a rung's rate in three digits: what is printed is what was played."""
    return float(f"{STEP**rung:.3g}")

"""The cost per request of a simulated fleet, in executed lines, by fleet size."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

from benchmarks.fluid import FIRST, RATE, TARGETS, fleet
from proxy.core.router import RouterSettings
from vllm_sched.bench.results.goodput import parse
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.aggregate_flow import AggregateFlow

SIZES = (16, 64, 256)
BEGINS_S, LASTS_S = FIRST / RATE, 0.4  # after each worker was probed, as in `benchmarks.fluid`
# Short answers, so that fleets of all sizes are fully busy by then.
TRAFFIC = "500x20:0.9,20000x20:0.1"


class LineCounter:
    """Count the lines that run inside its `with` block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, _frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._line

    def _line(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        self.count += event == "line"
        return self._line


def lines_per_request(workers: int) -> float:
    source, until = find(TRAFFIC), BEGINS_S + LASTS_S
    arrivals = list(Schedule(source=source, rate=RATE * workers, duration_s=until))
    first = next(number for number, each in enumerate(arrivals) if each.at >= BEGINS_S)
    lines = LineCounter()

    def marked() -> Iterator[Request]:
        yield from arrivals[:first]
        with lines:  # counts calls from here on
            yield from arrivals[first:]

    run = AggregateFlow(fleet(workers), RouterSettings(), parse(TARGETS.split())).play(marked())
    assert run.all.done == run.all.arrived
    return lines.count / (len(arrivals) - first)


def test_cost_per_request_grows_at_most_logarithmically_with_workers() -> None:
    costs = {workers: lines_per_request(workers) for workers in SIZES}
    assert min(costs.values()) > 100, costs
    for fewer, more in pairwise(SIZES):
        grown = math.log(more) / math.log(fewer)
        assert costs[more] < grown * costs[fewer], costs

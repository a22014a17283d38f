"""Event simulation of the closed system of `regime`, request by request.

Outputs are geometric; prompts are exponential or equal. Sampling is stratified, so some ten
thousand requests suffice. With one seed every threshold sees the same requests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from dataclasses import dataclass

from vllm_sched.cost.regime import Regime

REQUESTS = 40_000


@dataclass(frozen=True, slots=True)
class EventRun:
    throughput: float  # requests per second
    completion_s: float  # mean; all requests are present at the start
    served_s: float  # mean, from the start of prefill to the last token
    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float


def play(
    regime: Regime,
    threshold: int,
    *,
    requests: int = REQUESTS,
    seed: int = 0,
    alike: bool = False,
) -> EventRun:
    """Simulate a backlog until `requests` have departed, in whole cycles of prefill and decode."""
    rng = random.Random(seed)
    slots = regime.slots
    count = requests + slots
    outputs = _outputs(rng, count, regime.mean_output)
    lengths = [1.0] * count if alike else [-math.log(u) for u in _even(rng, count)]
    ends: defaultdict[int, list[float]] = defaultdict(list)  # admission times, by last step
    for output in outputs[:slots]:
        ends[output - 1].append(0.0)
    due = [*ends]  # heap of the steps in which requests end
    heapq.heapify(due)
    gaps: list[tuple[float, int]] = []
    now = finished = served = 0.0
    step = departed = 0
    active = admitted = slots
    while True:
        free = slots - active
        prefill, joining = 0.0, 0
        if free >= threshold or not active:
            if departed >= requests:
                now += regime.batch(free)
                break
            ahead = slice(admitted, admitted + free)
            prefill = regime.batch(math.fsum(lengths[ahead]))
            for output in outputs[ahead]:
                # After a mixed step, decoding starts in the next step.
                last = step + output - regime.decodes_pause
                if last not in ends:
                    heapq.heappush(due, last)
                ends[last].append(now)
            admitted += free
            joining = free
        elif due[0] > step:
            # All steps before the next departure are equal.
            now += (due[0] - step) * regime.decode(active)
            gaps.append((regime.decode(active), (due[0] - step) * active))
            step = due[0]
        decoding = active + (joining if regime.decodes_pause else 0)
        seconds = regime.decode(decoding)
        now += prefill + seconds
        if active:
            gaps.append((prefill + seconds, active))
        if decoding > active:
            gaps.append((seconds, decoding - active))
        gone = ends.pop(step, [])
        if gone:
            heapq.heappop(due)
        departed += len(gone)
        finished += now * len(gone)
        served += now * len(gone) - math.fsum(gone)
        active += joining - len(gone)
        step += 1
    p50, p99, longest = _percentiles(gaps)
    return EventRun(departed / now, finished / departed, served / departed, p50, p99, longest)


def _outputs(rng: random.Random, count: int, mean: float) -> list[int]:
    if mean <= 1:
        return [1] * count
    log_rest = math.log1p(-1 / mean)
    drawn = [math.ceil(math.log(u) / log_rest) for u in _even(rng, count)]
    return [max(each, 1) for each in drawn]


def _even(rng: random.Random, count: int) -> list[float]:
    """Draw one number from each of `count` equal parts of (0, 1], in random order."""
    drawn = [(index + 1 - rng.random()) / count for index in range(count)]
    rng.shuffle(drawn)
    return drawn


def _percentiles(gaps: list[tuple[float, int]]) -> tuple[float, float, float]:
    gaps.sort()
    whole = sum(count for _, count in gaps)
    found = []
    for share in (0.50, 0.99):
        left = share * whole
        for gap, count in gaps:
            left -= count
            if left <= 0:
                found.append(gap)
                break
    return found[0], found[1], gaps[-1][0]

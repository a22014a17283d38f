"""Event simulation of the closed system of `backlog_model`, request by request.

Outputs are geometric; prompts are exponential or equal. Sampling is stratified, so some ten
thousand requests suffice. With one seed every threshold sees the same requests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_sched.cost.backlog_model import BacklogModel

REQUESTS = 40_000


@dataclass(frozen=True, slots=True)
class BacklogRun:
    throughput: float  # requests per second
    completion_s: float  # mean; all requests are present at the start
    served_s: float  # mean, from the start of prefill to the last token
    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float


def simulate_backlog(
    model: BacklogModel,
    threshold: int,
    *,
    requests: int = REQUESTS,
    seed: int = 0,
    equal_prompts: bool = False,
) -> BacklogRun:
    """Simulate a backlog until `requests` have departed, in whole cycles of prefill and decode."""
    rng = random.Random(seed)
    count = requests + model.slots
    outputs = _outputs(rng, count, model.mean_output)
    lengths = [1.0] * count if equal_prompts else [-math.log(u) for u in _stratified(rng, count)]
    system = ClosedSystem(model, outputs, lengths)
    while True:
        free = model.slots - system.active
        if free < threshold and system.active:
            system.skip_to_departure()
            system.run_step()
        elif system.departed < requests:
            system.run_step(joining=free)
        else:
            return system.result(model.batch_seconds(free))


class ClosedSystem:
    """An engine that starts with all slots taken, and its backlog."""

    def __init__(
        self, model: BacklogModel, outputs: Sequence[int], lengths: Sequence[float]
    ) -> None:
        self.active = model.slots
        self.departed = 0
        self._model = model
        self._outputs = outputs
        self._lengths = lengths
        self._admitted = model.slots
        self._now, self._completion_sum_s, self._served_sum_s = 0.0, 0.0, 0.0
        self._step = 0
        self._gaps: list[tuple[float, int]] = []
        self._ends: defaultdict[int, list[float]] = defaultdict(list)  # admissions, by last step
        for output in outputs[: model.slots]:
            self._ends[output - 1].append(0.0)
        self._due = [*self._ends]  # heap of the steps in which requests end
        heapq.heapify(self._due)

    def skip_to_departure(self) -> None:
        """Pass the equal steps before the next departure."""
        steps = self._due[0] - self._step
        if steps > 0:
            seconds = self._model.decode_seconds(self.active)
            self._now += steps * seconds
            self._gaps.append((seconds, steps * self.active))
            self._step = self._due[0]

    def run_step(self, joining: int = 0) -> None:
        prefill_s = self._admit(joining) if joining else 0.0
        active, pauses = self.active, self._model.decodes_pause
        decoding = active + joining if pauses else active
        decode_s = self._model.decode_seconds(decoding)
        step_s = prefill_s + decode_s
        self._now = now = self._now + step_s
        if active:
            self._gaps.append((step_s, active))
        if decoding > active:
            self._gaps.append((decode_s, decoding - active))
        self.active = active + joining
        if admissions := self._ends.pop(self._step, None):
            heapq.heappop(self._due)
            count = len(admissions)
            self.active -= count
            self.departed += count
            self._completion_sum_s += now * count
            self._served_sum_s += now * count - math.fsum(admissions)
        self._step += 1

    def _admit(self, count: int) -> float:
        """Admit the next requests; return the seconds of their prefill."""
        ahead = slice(self._admitted, self._admitted + count)
        self._admitted += count
        ends, now = self._ends, self._now
        # After a mixed step, decoding starts in the next step.
        before_first = self._step - self._model.decodes_pause
        for output in self._outputs[ahead]:
            last = before_first + output
            if last not in ends:
                heapq.heappush(self._due, last)
            ends[last].append(now)
        return self._model.batch_seconds(math.fsum(self._lengths[ahead]))

    def result(self, last_prefill_s: float) -> BacklogRun:
        departed, now = self.departed, self._now + last_prefill_s
        spread = _percentiles(self._gaps)
        completion_s, served_s = self._completion_sum_s / departed, self._served_sum_s / departed
        return BacklogRun(departed / now, completion_s, served_s, *spread)


def _outputs(rng: random.Random, count: int, mean: float) -> list[int]:
    if mean <= 1:
        return [1] * count
    log_rest = math.log1p(-1 / mean)
    samples = [math.ceil(math.log(u) / log_rest) for u in _stratified(rng, count)]
    return [max(output, 1) for output in samples]


def _stratified(rng: random.Random, count: int) -> list[float]:
    """Draw one number from each of `count` equal parts of (0, 1], in random order."""
    samples = [(index + 1 - rng.random()) / count for index in range(count)]
    rng.shuffle(samples)
    return samples


def _percentiles(gaps: list[tuple[float, int]]) -> tuple[float, float, float]:
    gaps.sort()
    whole = sum(count for _, count in gaps)
    values = []
    for share in (0.50, 0.99):
        left = share * whole
        for gap, count in gaps:
            left -= count
            if left <= 0:
                values.append(gap)
                break
    return values[0], values[1], gaps[-1][0]

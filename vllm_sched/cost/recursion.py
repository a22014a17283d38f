"""The exact throughput of a threshold: a recursion over the number of active slots.

In each step a sequence ends with probability 1/m: departures are binomial. Expected steps at each
count follow from higher counts. Fixed-point iteration finds the start of cycles with mixed steps.

Cost: about K times the spread of a step's departures, for each K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_sched.cost.backlog_model import BacklogModel, expected_batch

MIN_PROBABILITY = 1e-15
MAX_CHANGE, MAX_ROUNDS = 1e-12, 200


@dataclass(frozen=True, slots=True)
class ThresholdResult:
    throughput: float  # requests per second
    batch: float  # prompts prefilled together
    steps: float  # decode-only steps between two batches
    active: float  # mean active slots, over these steps and the mixed step


class Recursion:
    def __init__(self, model: BacklogModel) -> None:
        self.model = model
        self._chances: dict[int, dict[int, float]] = {}
        self._results: dict[int, ThresholdResult] = {}

    def solve_for(self, threshold: int) -> ThresholdResult:
        if threshold not in self._results:
            self._results[threshold] = self._solve(threshold)
        return self._results[threshold]

    def best(self) -> int:
        low, high = 1, self.model.largest_threshold
        while high - low > 2:
            third = (high - low) // 3
            left, right = low + third, high - third
            if self.solve_for(left).throughput < self.solve_for(right).throughput:
                low = left + 1
            else:
                high = right
        return max(range(low, high + 1), key=lambda k: self.solve_for(k).throughput)

    def _solve(self, threshold: int) -> ThresholdResult:
        model = self.model
        while_held, ends = self._descend({model.slots: 1.0}, threshold)
        for _ in range(0 if model.decodes_pause else MAX_ROUNDS):
            before = ends
            while_held, ends = self._descend(self._after_batch(ends), threshold)
            changes = (abs(share - before.get(active, 0.0)) for active, share in ends.items())
            if sum(changes) < MAX_CHANGE:
                break
        seconds = sum(share * model.decode_seconds(active) for active, share in while_held.items())
        steps = sum(while_held.values())
        worked = sum(share * active for active, share in while_held.items())
        batch = 0.0
        for active, share in ends.items():
            prompts = model.slots - active
            batch += share * prompts
            seconds += share * expected_batch(model, prompts)
            if not model.decodes_pause:
                seconds += share * model.decode_seconds(active)
                worked += share * active
        work_steps = steps + (0.0 if model.decodes_pause else 1.0)
        return ThresholdResult(
            throughput=batch / seconds if seconds > 0 else math.inf,
            batch=batch,
            steps=steps,
            active=worked / work_steps if work_steps else float(model.slots),
        )

    def _descend(
        self, start: dict[int, float], threshold: int
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the steps at each count of active slots, and the final distribution."""
        slots = self.model.slots
        coming = dict(start)
        spent: dict[int, float] = {}
        for active in range(slots, slots - threshold, -1):
            share = coming.pop(active, 0.0)
            if share <= 0:
                continue
            chances = self._departures(active)
            spent[active] = steps = share / (1 - chances.get(0, 0.0))
            for departed, chance in chances.items():
                if departed:
                    left = active - departed
                    coming[left] = coming.get(left, 0.0) + steps * chance
        return spent, coming

    def _after_batch(self, ends: dict[int, float]) -> dict[int, float]:
        """Return the distribution of active slots after a mixed step."""
        start: dict[int, float] = {}
        for active, share in ends.items():
            for departed, chance in self._departures(active).items():
                left = self.model.slots - departed
                start[left] = start.get(left, 0.0) + share * chance
        return start

    def _departures(self, active: int) -> dict[int, float]:
        """Return the probability of each number of departures that is not negligible."""
        if active not in self._chances:
            first, chances = binomial(active, 1 / self.model.mean_output)
            self._chances[active] = dict(enumerate(chances, first))
        return self._chances[active]


def binomial(trials: int, chance: float) -> tuple[int, list[float]]:
    """Return the first non-negligible count and the probabilities from there."""
    if chance >= 1 or trials == 0:
        return trials, [1.0]
    mode = min(int((trials + 1) * chance), trials)
    peak = math.exp(
        math.lgamma(trials + 1)
        - math.lgamma(mode + 1)
        - math.lgamma(trials - mode + 1)
        + mode * math.log(chance)
        + (trials - mode) * math.log1p(-chance)
    )
    odds = chance / (1 - chance)
    above: list[float] = []
    value = peak
    for count in range(mode, trials):
        value *= odds * (trials - count) / (count + 1)
        if value < MIN_PROBABILITY:
            break
        above.append(value)
    below: list[float] = []
    value = peak
    for count in range(mode, 0, -1):
        value *= count / (odds * (trials - count + 1))
        if value < MIN_PROBABILITY:
            break
        below.append(value)
    row = [*reversed(below), peak, *above]
    whole = math.fsum(row)
    return mode - len(below), [value / whole for value in row]

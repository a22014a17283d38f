"""The checks of K."""

from __future__ import annotations

import pytest

from vllm_sched.cost.fit import OnlineFit
from vllm_sched.cost.step_time import StepTime
from vllm_sched.policies.deferral import threshold
from vllm_sched.policies.deferral.lengths import RequestLengths


@pytest.mark.parametrize(("checked", "k"), [(3, 5), (2, 1)])
def test_check_below_its_share_of_k_forgets_the_batches(
    checked: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[float] = []
    found = [*[5] * 7, checked, 5]
    monkeypatch.setattr(threshold, "to_run", lambda *_, **__: found.pop(0))
    monkeypatch.setattr(OnlineFit, "forget", lambda _, __, weight: weights.append(weight))
    monkeypatch.setattr(OnlineFit, "model", StepTime(decode_fixed_s=0.01, prefill_s=1e-4))
    lengths = RequestLengths()
    for _ in range(10):
        lengths.admitted()
        lengths.prefilled(100)
        lengths.departed(100)
    departures = threshold.DepartureThreshold(
        None, OnlineFit(), lengths, itl_s=None, max_hold_s=1.0, decodes_pause=False, budget=2048
    )
    step = 0
    while not departures.checking:
        departures.begin_step(step := step + 1, 32)
    assert departures.k == 5
    while departures.checking:
        departures.begin_step(step := step + 1, 32)
    assert departures.k == k
    assert len(weights) == (k == 1)
    assert all(0 < weight < 1 for weight in weights)

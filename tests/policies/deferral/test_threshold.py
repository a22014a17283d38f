"""The checks of K."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vllm_sched.cost.online_fit import OnlineFit
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.threshold import recommended
from vllm_sched.policies.deferral import threshold
from vllm_sched.policies.deferral.lengths import RequestLengths
from vllm_sched.policies.deferral.threshold import CHECK_BATCHES, CHECK_STEPS, DepartureThreshold
from vllm_sched.policies.fluid_effects import AdmissionHold
from vllm_sched.policies.types import EngineFacts


def learning(
    monkeypatch: pytest.MonkeyPatch, *, decodes_pause: bool = False, max_hold_s: float = 1.0
) -> DepartureThreshold:
    """Return a threshold whose every estimate is five."""
    monkeypatch.setattr(threshold, "recommended", lambda *_, **__: 5)
    monkeypatch.setattr(OnlineFit, "model", StepTime(decode_fixed_s=0.01, prefill_s=1e-4))
    lengths = RequestLengths()
    for _ in range(10):
        lengths.record_admission()
        lengths.record_prefill(100)
        lengths.record_departure(100)
    configured = AdmissionHold(departures=None, max_s=max_hold_s, itl_s=None)
    facts = EngineFacts(32_768, 2048, 32, decodes_pause=decodes_pause)
    return DepartureThreshold(configured, facts, OnlineFit(), lengths)


def held(departures: DepartureThreshold, steps: range) -> list[bool]:
    """Return for each step whether requests may be held."""
    found = []
    for step in steps:
        departures.begin_step(step, 32)
        found.append(departures.may_hold)
    return found


def test_checks_suspend_holds_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    departures = learning(monkeypatch)
    may_hold = held(departures, range(10_000))
    assert departures.k == 5
    changes = [step for step, (one, other) in enumerate(pairwise(may_hold), 1) if one != other]
    begin, *rest = changes
    checks = list(zip(rest[::2], rest[1::2], strict=False))
    assert begin == 4 * 64
    assert all(end - start == CHECK_STEPS for start, end in checks)
    gaps = [later[0] - sooner[1] for sooner, later in pairwise(checks)]
    assert len(gaps) >= 3
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[-1]


@pytest.mark.parametrize("kind", ["mixed", "prefill"])
def test_check_forgets_batches_and_ends_after_new_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[tuple[str, float]] = []
    monkeypatch.setattr(OnlineFit, "forget", lambda _, *what: forgotten.append(what))
    departures = learning(monkeypatch, decodes_pause=kind == "prefill")
    step = 0
    while not departures.may_hold:
        departures.begin_step(step := step + 1, 32)
    while departures.may_hold:
        departures.begin_step(step := step + 1, 32)
    assert [name for name, _ in forgotten] == [kind]
    assert all(0 < weight < 1 for _, weight in forgotten)
    for number in range(CHECK_BATCHES):
        monkeypatch.setattr(OnlineFit, "count_of", lambda _, name, n=number: n * (name == kind))
        departures.begin_step(step := step + 1, 32)
        assert not departures.may_hold
    monkeypatch.setattr(OnlineFit, "count_of", lambda _, name: CHECK_BATCHES * (name == kind))
    departures.begin_step(step := step + 1, 32)
    assert departures.may_hold


@pytest.mark.parametrize(("max_hold_s", "k"), [(0.05, 1), (0.3, 4), (10.0, 5)])
def test_longest_hold_limits_k(monkeypatch: pytest.MonkeyPatch, max_hold_s: float, k: int) -> None:
    departures = learning(monkeypatch, max_hold_s=max_hold_s)
    monkeypatch.setattr(threshold, "recommended", recommended)
    model = StepTime(decode_fixed_s=0.01, prefill_s=1e-4, mixed_s=0.02)
    monkeypatch.setattr(OnlineFit, "model", model)
    held(departures, range(400))
    assert departures.k == k

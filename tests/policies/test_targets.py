"""Targets as requests give them."""

from __future__ import annotations

import pytest

from vllm_sched.policies.targets import NO_TARGETS, RequestTargets, targets_in


@pytest.mark.parametrize(
    ("extra_args", "targets"),
    [
        ({}, NO_TARGETS),
        ({"lane": "batch"}, NO_TARGETS),
        ({"deadline_ms": 1500}, RequestTargets(1.5)),
        ({"deadline_ms": -20.0, "tpot_ms": 50}, RequestTargets(-0.02, 0.05)),
        ({"deadline_ms": 1e300, "tpot_ms": 1e300}, RequestTargets(86_400.0, 86_400.0)),
        ({"deadline_ms": True, "tpot_ms": "50"}, NO_TARGETS),
        ({"deadline_ms": float("nan"), "tpot_ms": 0}, NO_TARGETS),
        ({"deadline_ms": float("inf"), "tpot_ms": -1}, NO_TARGETS),
    ],
)
def test_only_finite_numbers_are_targets(
    extra_args: dict[str, object], targets: RequestTargets
) -> None:
    assert targets_in(extra_args) == targets

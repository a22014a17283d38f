"""The benchmark of `deferred_prefill` against K=1."""

from __future__ import annotations

from benchmarks import deferral
from tests.policies.closed_loop import ClosedLoop
from vllm_sched.policies import registry
from vllm_sched.policies.types import EngineFacts


def test_auto_gains_where_mixed_steps_cost_extra_and_loses_nowhere() -> None:
    gains = {}
    for extra_s in (0.0, 0.012):
        found = deferral.rates(extra_s, decodes_pause=False, requests=2000)
        gains[extra_s] = found["auto"] / found[1]
    assert gains[0.0] >= 0.98
    assert gains[0.012] > 1.05


def test_policy_that_is_switched_off_holds_no_request() -> None:
    held = {}
    for on in (True, False):
        with deferral.switched():
            (policy,) = registry.build(
                {"deferred_prefill": {"departures": 16}}, EngineFacts(32_768, 8192, 64)
            )
        assert isinstance(policy, deferral.SwitchedDeferral)
        policy.on = on
        loop = ClosedLoop([policy], deferral.PAPER, 64, 50, 220).run(500)
        held[on] = max(loop.batches[-100:])
    assert held[True] >= 16 > held[False]

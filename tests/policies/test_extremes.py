"""Every accepted setting serves all requests, and its gauges are finite."""

from __future__ import annotations

import json

import pytest

from tests.policies.making import Bench
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.kv_cache import KvCache, KvGroup
from vllm_sched.policies.types import EngineFacts

FACTS = EngineFacts(
    max_model_len=2000,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    kv_cache=KvCache(250, [KvGroup(16, 125)]),
)
LEAST, MOST = 5e-324, 1.7e308
EVERY = [
    (name, key)
    for name, policy in registry.POLICIES.items()
    for key in policy.settings_type.model_fields
]


def accepted_extremes(name: str, key: str) -> list[object]:
    """Return the extreme values that this setting accepts."""
    found: list[object] = []
    for value in (0, 1, LEAST, MOST, 10**30, 10**400):
        try:
            if registry.build({name: {key: value}}, FACTS):
                found.append(value)
        except UsageError:
            continue
    return found


@pytest.mark.parametrize(("name", "key"), EVERY)
def test_every_accepted_extreme_serves_all_requests(name: str, key: str) -> None:
    for extreme in accepted_extremes(name, key):
        bench = Bench({name: {key: extreme}}, max_num_seqs=4, num_blocks=251, max_model_len=2000)
        for number in range(12):
            bench.add(
                f"r{number}", (20, 75, 300, 900)[number % 4], output=20, priority=number % 3 - 1
            )
            bench.steps(2)
        bench.drain()
        policy = bench[name]
        assert all(0 <= value < float("inf") for value in policy.gauges().values())
        json.dumps(policy.effective_settings())

"""Every policy in a real worker: the default scheduler's tokens, and its metrics."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.arrivals import ARRIVALS
from tests.fleet.conftest import DECODE, FEW_SEATS, PREFILL, SETS, CompilerCache
from tests.fleet.test_seen import families, number
from tests.fleet.test_worker import Workers, client_of, complete, prompt, settled
from vllm_sched.policies import registry
from vllm_sched.policies.types import EngineFacts
from vllm_sched.workers.launch import Worker

pytestmark = pytest.mark.engine("pushing")


@pytest.fixture
def sets(pushing: Workers) -> Workers:
    """Return the two workers that push, by their policies."""
    return {"in parts": pushing[PREFILL], "whole": pushing[DECODE]}


async def outputs(worker: Worker) -> list[list[int]]:
    async with client_of(worker) as client:
        answers = await asyncio.gather(
            *(
                complete(
                    client,
                    prompt(9000 + index, tokens),
                    output,
                    vllm_xargs={} if lane is None else {"lane": lane},
                )
                for index, (_, tokens, output, lane) in enumerate(ARRIVALS)
            )
        )
    return [answer.choices[0].token_ids for answer in answers]


async def test_request_with_logprobs_compiles_nothing_new(
    sets: Workers, compiled: CompilerCache
) -> None:
    """A ready worker has compiled everything."""
    assert compiled.at_start
    for worker in sets.values():
        async with client_of(worker) as client:
            answer = await complete(client, prompt(9100, 40), 3, prompt_logprobs=1, logprobs=2)
        assert answer.choices[0].logprobs is not None
    assert compiled.files() == compiled.at_start


@pytest.mark.parametrize("name", SETS)
async def test_tokens_match_the_default_scheduler(
    storing: Worker, sets: Workers, name: str
) -> None:
    expected = await outputs(storing)
    assert [len(tokens) for tokens in expected] == [output for _, _, output, _ in ARRIVALS]
    assert await outputs(sets[name]) == expected
    await settled(sets[name], running=0, waiting=0)


@pytest.mark.parametrize("name", SETS)
async def test_metrics_of_each_policy_are_on_the_workers_page(sets: Workers, name: str) -> None:
    serving = asyncio.create_task(outputs(sets[name]))
    seen = []
    while not serving.done():
        found = await asyncio.to_thread(families, sets[name])
        seen.append(number(found, "requests_held"))
    await serving
    assert max(seen, default=0) <= len(ARRIVALS)  # no request is held by two policies
    found = await asyncio.to_thread(families, sets[name])
    policies = registry.build(SETS[name], EngineFacts(16_384, 512, FEW_SEATS))
    for policy in policies:
        for metric in policy.gauges():
            samples = found[f"vllm_sched_{metric}"].samples
            assert any(sample.labels["policy"] == policy.name for sample in samples), metric
        for metric in policy.counters():
            samples = found[f"vllm_sched_{metric}"].samples
            assert any(sample.labels["policy"] == policy.name for sample in samples), metric
        admitted = number(found, "requests_admitted_total", policy=policy.name)
        assert admitted >= len(ARRIVALS)
    if name == "in parts":
        assert number(found, "k", policy="deferred_prefill") == 2
        assert number(found, "chunk_budget_tokens", policy="chunk_budget") > 0
    else:
        # All requests arrived at once, in batches of four.
        assert number(found, "hold_seconds_count", policy="static_batching") > 0
        assert number(found, "paused_steps_total", policy="prefill_first") > 0

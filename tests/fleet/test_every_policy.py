"""Every policy in a real worker over HTTP: the default's tokens, and each is on its page."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arrivals import ARRIVALS
from tests.fleet.conftest import FLAGS
from tests.fleet.test_seen import families, number
from tests.fleet.test_worker import Workers, client_of, complete, prompt, settled
from vllm_sched.metrics_folder import VARIABLE
from vllm_sched.policies import registry
from vllm_sched.policies.types import EngineFacts
from vllm_sched.workers.launch import Side, Worker, worker
from vllm_sched.workers.tiny_model import tiny_model

# As many at once as do not contradict each other.
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "in parts": {
        "lanes": {}, "long_prompt": {"long_prefill_token_threshold": 800},
        "deferred_prefill": {"departures": 2}, "rotation": {"chunk": 128},
        "chunk_budget": {"itl_ms": 50.0},
    },
    "whole": {"static_batching": {"size": 4}, "prefill_first": {}},
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder in which the workers keep what they compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def sets(compiled: Path) -> Iterator[Workers]:
    """Start a worker for each set."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    with ExitStack() as stack:
        started = {
            name: worker(
                Side("+".join(policies), policies),
                model=str(tiny_model()),
                flags=(*FLAGS, "--max-num-seqs=6", "--served-model-name", "tiny"),
                env=environment,
                name=name.replace(" ", "-"),
                deadline_s=400,  # beside the others' workers
            )
            for name, policies in SETS.items()
        }
        for each in started.values():
            stack.callback(each.stop)
            each.start()
        for each in started.values():
            each.wait_ready()
        yield started


def files_in(folder: Path) -> list[Path]:
    """List what is in a folder, however deep."""
    return sorted(folder.rglob("*"))


async def outputs(of: Worker) -> list[list[int]]:
    """Have everybody served at once and return their tokens."""
    async with client_of(of) as client:
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


async def test_a_request_with_logprobs_finds_everything_compiled(
    sets: Workers, compiled: Path
) -> None:
    """First, before any other test has asked for them: a worker that is ready has compiled it."""
    before = files_in(compiled)
    assert before
    for each in sets.values():
        async with client_of(each) as client:
            answer = await complete(client, prompt(9100, 40), 3, prompt_logprobs=1, logprobs=2)
        assert answer.choices[0].logprobs is not None
    assert files_in(compiled) == before


def test_every_policy_is_here() -> None:
    assert {name for policies in SETS.values() for name in policies} == set(registry.POLICIES)


@pytest.mark.parametrize("name", SETS)
async def test_the_tokens_are_those_of_the_default(
    workers: Workers, sets: Workers, name: str
) -> None:
    expected = await outputs(workers["default"])
    assert [len(tokens) for tokens in expected] == [output for _, _, output, _ in ARRIVALS]
    assert await outputs(sets[name]) == expected
    await settled(sets[name], running=0, waiting=0)


@pytest.mark.parametrize("name", SETS)
async def test_what_each_does_is_on_the_workers_page(sets: Workers, name: str) -> None:
    serving = asyncio.create_task(outputs(sets[name]))
    seen = []
    while not serving.done():
        found = await asyncio.to_thread(families, sets[name])
        seen.append(number(found, "requests_held"))
    await serving
    assert max(seen, default=0) <= len(ARRIVALS)  # nobody is held by two
    found = await asyncio.to_thread(families, sets[name])
    policies = registry.build(SETS[name], EngineFacts(16_384, 512, 6))
    for policy in policies:
        for told in policy.gauges():
            samples = found[f"vllm_sched_{told}"].samples
            assert any(sample.labels["policy"] == policy.name for sample in samples), told
        for told in policy.counters():
            samples = found[f"vllm_sched_{told}"].samples
            assert any(sample.labels["policy"] == policy.name for sample in samples), told
        admitted = number(found, "requests_admitted_total", policy=policy.name)
        assert admitted >= len(ARRIVALS)
    if name == "in parts":
        assert number(found, "k", policy="deferred_prefill") == 2
        assert number(found, "chunk_budget_tokens", policy="chunk_budget") > 0
    else:
        # All came at once to batches of four.
        assert number(found, "hold_seconds_count", policy="static_batching") > 0
        assert number(found, "paused_steps_total", policy="prefill_first") > 0

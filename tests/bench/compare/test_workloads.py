from __future__ import annotations

import pytest

from vllm_sched.bench.compare.workloads import (
    BACKGROUND,
    BATCH,
    LONG,
    SHORT,
    TOKEN_IDS,
    build,
    chat_beside_batch,
    equal_prompts,
    long_blocks_short,
    saturated,
)
from vllm_sched.errors import UsageError


def test_long_blocks_short_has_the_documented_requests() -> None:
    workload = long_blocks_short(longs=3)
    by_class = {
        klass: [a for a in workload.arrivals if a.klass == klass]
        for klass in (BACKGROUND, LONG, SHORT)
    }
    assert [len(requests) for requests in by_class.values()] == [4, 3, 8]
    assert {a.prompt_tokens for a in by_class[LONG]} == {12_000}
    assert {a.at for a in by_class[LONG]} == {0.0}
    arrivals = [a.at for a in by_class[SHORT]]
    assert arrivals[0] == 0.3
    assert arrivals == sorted(set(arrivals))
    assert all(a.before_start == (a.klass == BACKGROUND) for a in workload.arrivals)
    # It lasts four times the long prefills.
    assert by_class[BACKGROUND][0].output_tokens > 4 * 3 * 12_000 / 512
    prompts = workload.prompts(1)
    assert [len(p) for p in prompts] == [a.prompt_tokens for a in workload.arrivals]
    assert all(token in TOKEN_IDS for prompt in prompts for token in prompt)


def test_every_prompt_is_unique_and_fixed_by_seed_and_round() -> None:
    workload = long_blocks_short(seed=7)
    assert workload.prompts(1) == long_blocks_short(seed=7).prompts(1)
    assert workload.lone_prompts(1, 3) == workload.lone_prompts(1, 3)
    assert workload.prompts(1) != long_blocks_short(seed=8).prompts(1)
    prompts = [
        tuple(prompt)
        for number in (1, 2)
        for prompt in workload.prompts(number) + workload.lone_prompts(number, 20)
    ]
    assert len(set(prompts)) == len(prompts)
    # First blocks differ too, so that the prefix cache has no hits.
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_unknown_workload_error_lists_the_valid_names() -> None:
    with pytest.raises(ValueError, match=r"'quake'.*long-blocks-short") as caught:
        build("quake")
    assert isinstance(caught.value, UsageError)


def test_equal_prompts_arrive_together() -> None:
    arrivals = equal_prompts().arrivals
    assert len(arrivals) == 8
    assert len(set(arrivals)) == 1
    assert len(build("equal-prompts", longs=3, seed=1).arrivals) == 3


def test_batch_requests_arrive_first_in_the_batch_lane() -> None:
    workload = chat_beside_batch()
    batch = [a for a in workload.arrivals if a.klass == BATCH]
    chats = [a for a in workload.arrivals if a.klass == SHORT]
    assert {(a.at, a.lane) for a in batch} == {(0.0, "batch")}
    assert {a.lane for a in chats} == {""}
    slots = int(workload.worker_flags[workload.worker_flags.index("--max-num-seqs") + 1])
    assert len(batch) > 3 * slots
    assert min(a.at for a in chats) > 0


def test_saturated_outputs_are_exponential_and_fixed_by_the_seed() -> None:
    outputs = [a.output_tokens for a in saturated(longs=4000).arrivals]
    assert 48 < sum(outputs) / len(outputs) < 52
    assert sum(o > 50 for o in outputs) / len(outputs) == pytest.approx(0.37, abs=0.03)
    assert saturated().arrivals == saturated().arrivals != saturated(seed=1).arrivals
    assert build("saturated", longs=None, seed=2) == saturated(seed=2)

"""Blocks per request, in caches with one or several groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policies.closed_loop import FakeRequest
from vllm_sched.policies.kv_cache import KvCache, KvGroup
from vllm_sched.policies.types import EngineFacts

FULL, WINDOW, STATE = KvGroup(16, 125), KvGroup(16, 9), KvGroup(16, 5, spare_blocks=3)


@pytest.mark.parametrize(
    ("groups", "tokens", "blocks"),
    [
        ([FULL], 16, 1),
        ([FULL], 17, 2),
        ([FULL, WINDOW], 100, 14),  # the window is not full
        ([FULL, WINDOW], 1600, 109),  # nor does it grow
        ([FULL, WINDOW, WINDOW], 1600, 118),
        ([FULL, STATE], 16, 5),  # drafts have states, too
        ([FULL, STATE], 1600, 105),
        ([], 1600, 0),
    ],
)
def test_blocks_of_counts_all_groups(groups: list[KvGroup], tokens: int, blocks: int) -> None:
    assert KvCache(1000, groups).blocks_for(tokens) == blocks


def test_blocks_at_most_bounds_the_blocks_of_a_step() -> None:
    assert KvCache(1000, [FULL, KvGroup(32, 60)]).blocks_at_most(320) == 30


def test_a_request_has_its_blocks_share_and_the_smallest_block_counts() -> None:
    facts = EngineFacts(
        max_model_len=2000,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        kv_cache=KvCache(50, [KvGroup(32, 60), FULL]),
    )
    assert facts.block_tokens == 16
    assert facts.kv_share(FakeRequest("a", 64)) == 6 / 50
    unknown = replace(facts, kv_cache=None)
    assert (unknown.block_tokens, unknown.kv_share(FakeRequest("a", 64))) == (16, 0.0)

"""Blocks per request, in caches with one or several groups."""

from __future__ import annotations

import pytest

from vllm_sched.policies.kv_cache import KvCache, KvGroup

FULL, WINDOW, STATE = KvGroup(16, 125), KvGroup(16, 9), KvGroup(16, 5, spare=3)


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
    assert KvCache(1000, groups).blocks_of(tokens) == blocks


def test_blocks_at_most_bounds_the_blocks_of_a_step() -> None:
    assert KvCache(1000, [FULL, KvGroup(32, 60)]).blocks_at_most(320) == 30

"""Requests, policies and step times for the real engine and its simulation."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

# Step of arrival, prompt tokens, output tokens, lane. At times more requests than slots.
ARRIVALS = [
    (0, 40, 30, None), (0, 300, 12, "batch"), (3, 1500, 6, None), (5, 700, 12, "urgent"),
    (5, 7, 24, "batch"), (8, 1200, 6, "batch"), (12, 64, 24, "urgent"), (14, 900, 12, None),
    (20, 128, 8, None), (24, 500, 8, "batch"), (30, 33, 16, "urgent"), (31, 1000, 4, None),
]  # fmt: skip
SETS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "static_batching": {"static_batching": {"size": 3}},
    "prefill_first": {"prefill_first": {}},
    "lanes": {"lanes": {"reserve_slots": 0.5, "recent_s": 1e6, "urgent_max_wait_s": 1e6}},
    # V0's threshold; the default would be the budget of 256 tokens.
    "long_prompt": {
        "long_prompt": {"long_prefill_token_threshold": 81, "max_num_partial_prefills": 4}
    },
    "deferred_prefill": {"prefill_first": {}, "deferred_prefill": {"departures": 2}},
    "rotation": {"rotation": {"chunk": 64}},
    "chunk_budget": {"chunk_budget": {"chunk": 32}},
    "chunk_budget, itl": {"chunk_budget": {"itl_ms": 3.0, "ttft_ms": 200.0}},
    "every": {
        "lanes": {}, "long_prompt": {}, "deferred_prefill": {"departures": 2}, "rotation": {},
        "chunk_budget": {"itl_ms": 5.0},
    },
}  # fmt: skip


def seconds_of(number: int, tokens: Collection[int]) -> float:
    """Return the time of a step by its requests' tokens, with 10 % of random variation.

    Policies that read the clock then decide the same on any machine.
    """
    work = 0.002 + 0.0001 * len(tokens) + 0.00003 * sum(tokens)
    return work * random.Random(number).uniform(0.9, 1.1)

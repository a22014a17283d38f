"""The requests of `floods`: endless shorts, earlier requests, and the held one."""

from __future__ import annotations

from typing import Any

AHEAD = 12  # unfinished shorts at all times
MOST_STEPS = 200
STEP_S, BOUND_S, NEVER_S = 0.02, 0.3, 1e6
Request = tuple[int, int, str | None]  # prompt, output, lane
SCENES: dict[str, dict[str, Any]] = {
    "long_prompt": {
        # The earlier request gets a token or two of each step.
        "before": [(1500, 4, None)],
        "held": (1200, 4, None),
        "held_at": 8,
        "shorts": (40, 4, None),
        "policy": {"long_prefill_token_threshold": 300, "long_prefill_share": 0.01},
        "bounded": {"max_wait_s": BOUND_S},
        "unbounded": {"max_wait_s": NEVER_S},
    },
    "lanes": {
        "before": [],
        "held": (300, 4, "batch"),
        "held_at": 8,
        "shorts": (40, 4, None),
        "policy": {},
        "bounded": {"batch_max_wait_s": BOUND_S},
        "unbounded": {"batch_max_wait_s": NEVER_S},
    },
    "deferred_prefill": {
        # All six slots must be free before a request enters, and five stay taken.
        "before": [*[(40, 400, None)] * 5, (40, 4, None)],
        "held": (40, 4, None),
        "held_at": 0,
        "shorts": (40, 4, None),
        "policy": {"departures": 6},
        "bounded": {"max_delay_ms": 1000 * BOUND_S},
        "unbounded": {"max_delay_ms": 1000 * NEVER_S},
    },
}
PLACES = 4  # concurrent overdue longs
# The last of many longs, which precede all shorts.
MANY: dict[str, Any] = {
    "before": [(500, 4, None)] * 7,
    "held": (500, 4, None),
    "held_at": 0,
    "shorts": (40, 4, None),
    "policy": {
        "long_prefill_token_threshold": 100,
        "long_prefill_share": 0.5,
        "max_num_partial_prefills": PLACES,
    },
    "bounded": {"max_wait_s": BOUND_S},
    "unbounded": {"max_wait_s": NEVER_S},
}

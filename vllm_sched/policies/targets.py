"""The targets of requests, which the router sends in `vllm_xargs`.

`deadline_ms` is what is left until the first token when the request is sent, and may be negative.
`tpot_ms` is the time per later token. Other values are ignored: it is too late to refuse a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

DEADLINE, TPOT = "deadline_ms", "tpot_ms"
MAX_MS: Final = 86_400_000.0


class RequestTargets(NamedTuple):
    """Seconds until the first token, and per later token; None without a target."""

    left_s: float | None = None
    tpot_s: float | None = None


NO_TARGETS: Final = RequestTargets()


def targets_in(extra_args: Mapping[str, object]) -> RequestTargets:
    if DEADLINE not in extra_args and TPOT not in extra_args:
        return NO_TARGETS
    left_s, tpot_s = _seconds(extra_args.get(DEADLINE)), _seconds(extra_args.get(TPOT))
    return RequestTargets(left_s, tpot_s if tpot_s is not None and tpot_s > 0 else None)


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return min(max(value, -MAX_MS), MAX_MS) / 1000

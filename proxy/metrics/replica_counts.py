"""Metrics of the state that replicas on several hosts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from proxy.metrics.exposition import Family, counter, gauge

UP = gauge(
    "proxy_shared_up",
    "0 if the server of router.shared cannot be reached; 1 otherwise, and without router.shared.",
)
LIMITS_UP = gauge(
    "proxy_shared_limits_up",
    "0 if this router decides tenants' limits alone, because the server of router.shared does not "
    "answer; 1 otherwise.",
)
REPLICAS = gauge("proxy_replicas", "Router replicas that this one hears from, with itself.")
AGE = gauge(
    "proxy_shared_age_seconds",
    "Time since the last message of the replica that was silent for the longest time.",
)
ERRORS = counter(
    "proxy_shared_errors",
    "Lost connections to the server of router.shared, and messages that could not be read.",
)


class ReplicaCounts(NamedTuple):
    """Values of the metrics; by default those of a router without replicas."""

    up: bool = True
    replicas: int = 1
    age_s: float = 0.0
    errors: int = 0

    def rows(self) -> Iterator[tuple[Family, float]]:
        return zip((UP, REPLICAS, AGE, ERRORS), map(float, self), strict=True)


ALONE = ReplicaCounts()

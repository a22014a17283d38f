"""How many processes a router has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.config import FleetConfig

MOST_BY_ITSELF = 8
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds in so many, or `max`


def how_many(config: FleetConfig) -> int:
    """Return how many processes a fleet file asks for, here."""
    asked = config.router.processes
    if isinstance(asked, int):
        return asked
    return min(processors(), MOST_BY_ITSELF)


def processors() -> int:
    """Return how many processors this process may keep busy: a container may have less than all."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text().split()
        return allowed if quota == "max" else max(min(allowed, int(quota) // int(period)), 1)
    except (OSError, ValueError):
        return allowed

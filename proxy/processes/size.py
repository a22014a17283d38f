"""The number of router processes."""

from __future__ import annotations

import os
from pathlib import Path

from proxy.config import FleetConfig

MAX_AUTOMATIC_PROCESSES = 8
# Quota and period in microseconds; the quota may be `max`.
CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def process_count(config: FleetConfig) -> int:
    """Return the number of processes that a fleet file asks for on this machine."""
    configured = config.router.processes
    if isinstance(configured, int):
        return configured
    return min(usable_cpus(), MAX_AUTOMATIC_PROCESSES)


def usable_cpus() -> int:
    """Return the number of usable processors; a container may have a quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA_FILE.read_text().split()
        return allowed if quota == "max" else max(min(allowed, int(quota) // int(period)), 1)
    except (OSError, ValueError):
        return allowed

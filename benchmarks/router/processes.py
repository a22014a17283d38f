"""CPU time, memory and CPU affinity of a process and its children."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
KIB = 1024
# Linux: the CPU clock of a process is its inverted id with this in the low bits. It counts utime
# and stime of /proc/PID/stat, in nanoseconds.
CPU_CLOCK = 2


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process tree."""

    rss: int
    pss: int  # shared pages count in part


def tree(pid: int) -> list[int]:
    children = defaultdict(list)
    for path in PROC.glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process ended
        parent = int(text.rpartition(")")[2].split()[1])
        children[parent].append(int(path.parent.name))
    pids = [pid]
    for parent_pid in pids:
        pids += children[parent_pid]
    return pids


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes so far; the call takes microseconds."""
    return sum(time.clock_gettime((~pid << 3) | CPU_CLOCK) for pid in pids)


def memory(pids: Iterable[int]) -> Memory:
    total = {"Rss": 0, "Pss": 0}
    for pid in pids:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0]) * KIB
    return Memory(total["Rss"], total["Pss"])


@contextmanager
def running_on(cpus: frozenset[int] | None) -> Iterator[None]:
    """Run this thread and its new children on these CPUs; None changes nothing."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

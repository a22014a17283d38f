"""Memory of a router process."""

from __future__ import annotations

import subprocess
import sys

import pytest

RETURNED = """
import asyncio
from pathlib import Path
from proxy.setup.memory import keep_freed_memory, return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

async def main():
    bodies = 0
    returning = asyncio.create_task(return_freed_memory(lambda: bodies, idle_s=0.01))
    await asyncio.sleep(0)
    before, body = resident(), b"x" * 48_000_000
    bodies, body = 1, None
    kept = left = resident() - before
    while left > 5_000_000:  # ends with the time limit otherwise
        await asyncio.sleep(0.01)
        left = resident() - before
    print(kept)

keep_freed_memory()
asyncio.run(main())
"""
FAULTS = """
import resource
from proxy.setup.memory import keep_freed_memory
{first}

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

bytes(bytearray(24_000_000))
before = faults()
for _ in range(10):
    bytes(bytearray(24_000_000))
print(faults() - before)
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")


def test_memory_of_large_bodies_is_reused() -> None:
    def faults(first: str) -> int:
        script = FAULTS.format(first=first)
        return int(subprocess.check_output([sys.executable, "-c", script], text=True))

    assert faults("") > 1000  # pages are mapped anew for each body
    assert faults("keep_freed_memory()") < 100


def test_freed_memory_is_returned_without_large_bodies() -> None:
    script = [sys.executable, "-c", RETURNED]
    assert int(subprocess.check_output(script, text=True, timeout=60)) > 40_000_000

"""Memory of a router process."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_of_large_bodies_is_reused() -> None:
    def faults(first: str) -> int:
        script = FAULTS.format(first=first)
        return int(subprocess.check_output([sys.executable, "-c", script], text=True))

    assert faults("") > 1000  # pages are mapped anew for each body
    assert faults("keep_freed_memory()") < 100

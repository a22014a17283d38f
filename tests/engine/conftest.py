"""One real engine, run under each set of policies once for all tests that look at that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arrivals import SETS
from tests.upstream.source import skip_without_kernels

# The same step takes up to a third more or less of a processor that others use too, and where that
# is lent to another machine, many times as much: three takes of seven may be spoilt.
TAKES = 7


@pytest.fixture(scope="session")
def takes() -> dict[str, list[dict[str, Any]]]:
    """Run one engine under each set, in a process of its own: its settings are the process's."""
    skip_without_kernels()
    sets = json.dumps(list(SETS.values()))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.one_engine", sets, str(TAKES)],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    return {name: [take[number] for take in told] for number, name in enumerate(SETS)}


@pytest.fixture(scope="session")
def runs(takes: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Give one run under each set: what is decided by no clock is the same in all."""
    return {name: taken[0] for name, taken in takes.items()}

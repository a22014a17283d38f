"""One real engine, run under each set of policies once for all tests that look at that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arrivals import SETS


@pytest.fixture(scope="session")
def runs() -> dict[str, dict[str, Any]]:
    """Run one engine under each set, in a process of its own: its settings are the process's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.one_engine", json.dumps(list(SETS.values()))],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(SETS, json.loads(done.stdout.splitlines()[-1]), strict=True))

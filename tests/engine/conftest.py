"""One real engine, started once for all tests of its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.upstream.source import skip_without_kernels

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def one_process() -> dict[str, Results]:
    """Run the engine in its own process, because its settings are environment variables."""
    skip_without_kernels()
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.one_process"],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Results] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="session")
def runs(one_process: dict[str, Results]) -> Results:
    return one_process["runs"]


@pytest.fixture(scope="session")
def floods(one_process: dict[str, Results]) -> Results:
    return one_process["floods"]


@pytest.fixture(scope="session")
def journaled(one_process: dict[str, Results]) -> dict[str, Any]:
    return one_process["journal"]["all"]


@pytest.fixture(scope="session")
def continued(one_process: dict[str, Results]) -> dict[str, Any]:
    return one_process["continued"]


@pytest.fixture(scope="session")
def offloaded(one_process: dict[str, Results]) -> dict[str, Any]:
    return one_process["offloaded"]

"""Programs that scripts fetch if they are not installed, and tests that need them."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"

lacking: dict[str, str] = {}  # missing programs, with the reason


@functools.cache
def _fetched(name: str) -> str:
    done = subprocess.run([SCRIPTS / f"{name}.sh"], capture_output=True, text=True)
    if done.returncode:
        lacking[name] = done.stderr.strip()
    return done.stdout.strip()


def fetched(name: str) -> str:
    """Return what a script prints; if it fails, skip the test, or fail it with CI=1."""
    found = _fetched(name)
    if name not in lacking:
        return found
    if os.environ.get("CI"):
        pytest.fail(lacking[name])
    pytest.skip(lacking[name])


def untested(reasons: list[str]) -> list[str]:
    """Return a line per missing program with the number of skipped tests."""
    return [
        f"{sum(reason.endswith(why) for reason in reasons)} tests want {name} and were skipped; "
        f"with CI=1 they fail. {why}"
        for name, why in lacking.items()
    ]

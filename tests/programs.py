"""Programs that scripts fetch, and the tests that are skipped without them."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"

missing: dict[str, str] = {}  # the reason by program


@functools.cache
def _fetched(name: str) -> str:
    done = subprocess.run([SCRIPTS / f"{name}.sh"], capture_output=True, text=True)
    if done.returncode:
        missing[name] = done.stderr.strip()
    return done.stdout.strip()


def fetched(name: str) -> str:
    """Return a script's output; if it fails, skip the test, or fail it with CI set."""
    found = _fetched(name)
    if name not in missing:
        return found
    if os.environ.get("CI"):
        pytest.fail(missing[name])
    pytest.skip(missing[name])


def untested(reasons: list[str]) -> list[str]:
    """Return a line for each missing program, with the number of skipped tests."""
    return [
        f"{sum(reason.endswith(why) for reason in reasons)} tests need {name} and were skipped; "
        f"with CI=1 they fail. {why}"
        for name, why in missing.items()
    ]

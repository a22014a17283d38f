"""A run that starts too many engines fails and prints the count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.starts import MAX_STARTS
from tests.test_parallel import NO_PLUGINS

ROOT = Path(__file__).parents[1]
# One process for each engine.
STARTS = """
import os, subprocess, sys
NOTE = "import engine_starts as e, os; e.note(os.environ[e.VARIABLE], 'tiny')"
def test_it():
    for _ in range({count}):
        subprocess.run([sys.executable, "-c", NOTE], check=True)
"""


@pytest.mark.parametrize(
    ("count", "status", "line"),
    [
        (0, 0, ""),
        (2, 0, "engine starts: 2\n"),
        (MAX_STARTS + 1, 1, "engine starts: 13, of 12 at most\n"),
    ],
)
def test_the_starts_of_all_processes_are_counted(
    tmp_path: Path, count: int, status: int, line: str
) -> None:
    (tmp_path / "test_it.py").write_text(STARTS.format(count=count))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.starts", "-p", "no:cacheprovider",
         "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=NO_PLUGINS,
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == status
    assert ("engine starts" in done.stdout) == bool(count)
    assert line in done.stdout

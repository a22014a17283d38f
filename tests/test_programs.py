"""What a run of the tests says where a program is neither there nor to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WANTS_ONE = "tests/prometheus/test_rules.py::test_promtool_accepts_the_rules"
WANTS_NONE = "tests/prometheus/test_rules.py::test_recorded_names_are_unique"


def run(folder: Path, *tests: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run tests where there are neither Prometheus nor apt."""
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    environment = {**os.environ, "PATH": str(folder), "HOME": str(folder)}
    for name in ("CI", "XDG_CACHE_HOME", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment | more)


def test_what_was_skipped_is_said_last_and_how_to_have_it(tmp_path: Path) -> None:
    done = run(tmp_path, WANTS_ONE, WANTS_NONE)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, head, told, counts = done.stdout.strip().splitlines()
    assert head.strip("=") == " not tested here "
    assert told.startswith("2 tests want prometheus and were skipped; with CI=1 they fail. ")
    assert told.endswith("put prometheus and promtool on the PATH")
    assert counts.startswith("1 passed, 2 skipped")


def test_whoever_counts_on_it_sees_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, WANTS_ONE, CI="1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed" in done.stdout


def test_where_all_is_there_nothing_is_said(tmp_path: Path) -> None:
    assert "not tested here" not in run(tmp_path, WANTS_NONE).stdout

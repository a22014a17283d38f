"""A test run with a missing program that cannot be fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS_PROGRAM = "tests/prometheus/test_rules.py::test_promtool_has_no_complaint"
NEEDS_NOTHING = "tests/prometheus/test_rules.py::test_no_two_rules_record_the_same"


def run(folder: Path, *tests: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run tests without Prometheus and apt."""
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    environment = {**os.environ, "PATH": str(folder), "HOME": str(folder)}
    for name in ("CI", "XDG_CACHE_HOME", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment | more)


def test_skipped_tests_are_reported_with_a_remedy(tmp_path: Path) -> None:
    done = run(tmp_path, NEEDS_PROGRAM, NEEDS_NOTHING)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, head, line, counts = done.stdout.strip().splitlines()
    assert head.strip("=") == " not tested here "
    assert line.startswith("2 tests want prometheus and were skipped; with CI=1 they fail. ")
    assert line.endswith("put prometheus and promtool on the PATH")
    assert counts.startswith("1 passed, 2 skipped")


def test_missing_program_fails_in_ci(tmp_path: Path) -> None:
    done = run(tmp_path, NEEDS_PROGRAM, CI="1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed" in done.stdout


def test_nothing_is_reported_without_missing_programs(tmp_path: Path) -> None:
    assert "not tested here" not in run(tmp_path, NEEDS_NOTHING).stdout

"""The report of a test run without a program that tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS_PROMETHEUS = """
from tests.programs import fetched
def test_first(): fetched("prometheus")
def test_second(): fetched("prometheus")
"""
NEEDS_NOTHING = "def test_third(): pass\n"
OPTIONS = ("-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:schemathesis")


def run(folder: Path, tests: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run tests without Prometheus and apt."""
    (folder / "test_it.py").write_text(tests)
    for name in ("bash", "dirname"):
        if not (folder / name).exists():
            (folder / name).symlink_to(str(shutil.which(name)))
    environment = {**os.environ, "PATH": str(folder), "HOME": str(folder)}
    for name in ("CI", "XDG_CACHE_HOME", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = (sys.executable, "-m", "pytest", *OPTIONS, "--rootdir", str(folder), str(folder))
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment | more)


def test_skipped_tests_and_the_remedy_are_printed_last(tmp_path: Path) -> None:
    done = run(tmp_path, NEEDS_PROMETHEUS + NEEDS_NOTHING)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, head, reason, counts = done.stdout.strip().splitlines()
    assert head.strip("=") == " not tested here "
    assert reason.startswith("2 tests need prometheus and were skipped; with CI=1 they fail. ")
    assert reason.endswith("put prometheus and promtool on the PATH")
    assert counts.startswith("1 passed, 2 skipped")
    assert "not tested here" not in run(tmp_path, NEEDS_NOTHING).stdout


def test_with_ci_set_they_fail(tmp_path: Path) -> None:
    done = run(tmp_path, NEEDS_PROMETHEUS, CI="1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed" in done.stdout

"""Tests in several processes: each runs once, and what ends a process fails the test it ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel import FIRST

ROOT = Path(__file__).parents[1]
# Plugins of installed packages take half of the time of such a run.
NO_PLUGINS = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
CONFTEST = 'pytest_plugins = ["tests.parallel"]\n'
SETTINGS = """
[pytest]
addopts = -ra -p no:cacheprovider --processes 2
markers =
    engine
    browser
"""
SHARED = """
import os, pathlib, pytest
FIRST = int(pathlib.Path("first").read_text())

@pytest.fixture(scope="module")
def place():
    return object()

PLACES = set()

@pytest.mark.parametrize("number", range(40))
def test_in_another_process(number, place):
    assert os.getppid() == FIRST
    PLACES.add(place)
    assert len(PLACES) == 1

ENGINES = []

@pytest.mark.engine("other")
@pytest.mark.parametrize("number", range(2))
def test_with_the_other_engine(number):
    ENGINES.append("other")
    assert ENGINES == (number + 1) * ["other"]

@pytest.mark.engine
@pytest.mark.parametrize("number", range(20))
def test_with_an_engine(number):
    assert os.getppid() == FIRST
    assert not PLACES
    ENGINES.append(number)
    assert ENGINES == [*range(number + 1)]

def test_fails():
    print("what it printed")
    assert 1 + 1 == 3

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass
"""
DIES = """
import os

def test_before():
    pass

def test_dies():
    os._exit(3)
"""


HANGS = """
import os, pathlib, signal, time, pytest

@pytest.mark.parametrize("number", range(32))
def test_hangs(number):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pathlib.Path(f"pid-{os.getpid()}").touch()
    time.sleep(60)
"""


def start(folder: Path, *options: str, **files: str) -> subprocess.Popen[str]:
    """Start pytest there, in two processes."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(SETTINGS)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    code = (
        "import os, pathlib, sys, pytest\n"
        "pathlib.Path('first').write_text(str(os.getpid()))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *options],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=NO_PLUGINS,
    )  # fmt: skip


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Run pytest there, and return its status and what it prints."""
    running = start(folder, *options, **files)
    printed, _ = running.communicate()
    return running.returncode, printed


@pytest.mark.parametrize("path", FIRST)
def test_files_that_begin_first_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def test_each_test_runs_once_and_is_reported_as_in_one_process(tmp_path: Path) -> None:
    status, printed = run(tmp_path, shared=SHARED)
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert "1 failed, 62 passed, 1 skipped" in printed
    assert "assert (1 + 1) == 3" in printed
    assert "what it printed" in printed


def test_a_process_that_dies_fails_the_test_it_ran(tmp_path: Path) -> None:
    status, printed = run(tmp_path, dies=DIES, shared=SHARED.replace("== 3", "== 2"))
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert "died in this test" in printed
    assert "FAILED test_dies.py::test_dies" in printed
    assert "1 failed, 64 passed, 1 skipped" in printed


def test_it_stops_at_the_first_failure_where_that_is_asked_for(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "-x", dies=DIES, shared=SHARED)
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert "stopping after 1 failures" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupt_leaves_no_process_behind(tmp_path: Path, number: int) -> None:
    give_up = time.monotonic() + 60.0
    with start(tmp_path, hangs=HANGS) as running:
        while len(begun := [*tmp_path.glob("pid-*")]) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.02)
        running.send_signal(number)
        running.wait(timeout=30)
    for each in begun:
        while is_running(int(each.name.removeprefix("pid-"))):
            assert time.monotonic() < give_up
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status

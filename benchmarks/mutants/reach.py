"""A pytest plugin that records which tests run which lines, and the reader of its files.

Each test is a coverage.py context, so only the tests that run a mutant's line need to run. Lines
that run in child processes are not recorded.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = "MUTANTS_REACH"  # environment variable with the output folder


class Reach:
    """The recorder of one process of a test run."""

    def __init__(self, folder: Path, sources: list[str]) -> None:
        self._seconds: dict[str, float] = {}
        self._seconds_file = folder / f"seconds.{os.getpid()}"
        self._coverage = coverage.Coverage(
            data_file=folder / f"reach.{os.getpid()}", source=sources, config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record lines and duration under the test's name."""
        self._coverage.switch_context(item.nodeid)
        started = time.monotonic()
        result = yield
        self._seconds[item.nodeid] = time.monotonic() - started
        self._coverage.switch_context("")
        return result

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._seconds_file.write_text(json.dumps(self._seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Start the recorder before our modules are imported."""
    sources = [str(Path(name).resolve()) for name in ("proxy", "vllm_sched")]
    config.pluginmanager.register(Reach(Path(os.environ[FOLDER]), sources))


def read(folder: Path) -> dict[Path, dict[int, frozenset[str]]]:
    """Return the tests that run each line of each file."""
    by_file: dict[Path, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("*/reach.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for name in data.measured_files():
            for line, contexts in data.contexts_by_lineno(name).items():
                by_file[Path(name)][line] |= set(contexts) - {""}
    return {
        path: {line: frozenset(tests) for line, tests in lines.items()}
        for path, lines in by_file.items()
    }


def seconds(folder: Path) -> dict[str, float]:
    durations: dict[str, float] = {}
    for file in folder.glob("*/seconds.*"):
        durations |= json.loads(file.read_text())
    return durations

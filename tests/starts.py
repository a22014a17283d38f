"""Count the engines that all processes of a run start, print the count, and limit it.

Tests that use an engine are marked `engine`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.counting.engine_starts import VARIABLE

MAX_STARTS = 12
TESTS = Path(__file__).parent
PLUGIN = TESTS / "counting"
FLEET = TESTS / "fleet"  # all of its tests use an engine; other files mark their own


class Starts:
    """The engine starts of one run."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="engine-starts-")
        os.close(handle)
        self._file = Path(name)
        self.count = 0
        paths = [str(PLUGIN), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ[VARIABLE] = name

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Count the starts, and fail a run with too many."""
        self.count = len(self._file.read_text().splitlines())
        self._file.unlink()
        if self.count > MAX_STARTS and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the count."""
        if self.count:
            limit = f", of {MAX_STARTS} at most" if self.count > MAX_STARTS else ""
            terminalreporter.line(
                f"engine starts: {self.count}{limit}", red=self.count > MAX_STARTS
            )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that share the fleet's workers."""
    if item.path.is_relative_to(FLEET) and item.get_closest_marker("engine") is None:
        item.add_marker(pytest.mark.engine("fleet"))


def pytest_configure(config: pytest.Config) -> None:
    """Start to count."""
    config.pluginmanager.register(Starts())

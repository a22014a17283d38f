"""Count the engines that a run starts in all its processes, print the count, and bound it.

Tests that use an engine are marked `engine`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.counting.engine_starts import VARIABLE

MOST = 12
TESTS = Path(__file__).parent
PLUGIN = TESTS / "counting"
FLEET = TESTS / "fleet"  # all of its tests use an engine; other files mark their own


class Starts:
    """The count of this run."""

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
        """Count the starts; a run with too many fails."""
        self.count = len(self._file.read_text().splitlines())
        self._file.unlink()
        if self.count > MOST and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many there were."""
        if self.count:
            most = f", of {MOST} at most" if self.count > MOST else ""
            terminalreporter.line(f"engine starts: {self.count}{most}", red=self.count > MOST)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the fleet."""
    if item.path.is_relative_to(FLEET):
        item.add_marker("engine")


def pytest_configure(config: pytest.Config) -> None:
    """Count from here on."""
    config.pluginmanager.register(Starts())

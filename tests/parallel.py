"""Tests side by side: `--processes N` forks this process once all tests are collected.

Collecting takes half a minute of a processor, once, however many processes there are. Each process
takes small groups of tests, of one file each, from a pipe; its reports come back through another.
Tests that are marked `engine` or `browser` follow in this process, with the machine to themselves.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby, islice, zip_longest
from typing import Any

import pytest

GROUP_TESTS = 16  # at most, so that none is long
ALONE = ("engine", "browser")
NUMBER = struct.Struct("I")

Group = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--processes", type=int, default=0, help="run tests in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Run the tests that may share the machine, then the others one by one."""
    count: int = session.config.getoption("processes")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    alone = [each for each in session.items if any(map(each.get_closest_marker, ALONE))]
    left = set(alone)
    shared = [each for each in session.items if each not in left]
    while shared:
        reported = run(session, list(groups(shared)), count)
        # What a process that died had taken is left.
        shared = [each for each in shared if each.nodeid not in reported]
        assert reported, "processes die outside of tests; their output says why"
    for item, following in zip_longest(alone, alone[1:]):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        stop_where_asked(session)
    return True


def stop_where_asked(session: pytest.Session) -> None:
    """End the session where a failure or a signal asks for it, as pytest's own loop does."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def groups(items: Sequence[pytest.Item]) -> Iterator[Group]:
    """Divide tests into groups of one file each."""
    for _, some in groupby(items, lambda item: item.path):
        while group := list(islice(some, GROUP_TESTS)):
            yield group


def run(session: pytest.Session, every: Sequence[Group], count: int) -> set[str]:
    """Run groups in so many processes, report as each test ends, and return which did."""
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
    numbers, feed = os.pipe()
    gc.collect()
    gc.freeze()
    running = [Process(session, every, numbers, feed) for _ in range(min(count, len(every)))]
    os.close(numbers)
    try:
        os.write(feed, b"".join(map(NUMBER.pack, range(len(every)))))
        os.close(feed)
        with selectors.DefaultSelector() as selector:
            for process in running:
                selector.register(process.reports, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    if not key.data.read(session):
                        selector.unregister(key.fileobj)
                stop_where_asked(session)
        return {nodeid for process in running for nodeid in process.reported}
    finally:
        gc.unfreeze()
        for process in running:
            process.end()


class Process:
    """A forked process, as this one sees it."""

    def __init__(
        self, session: pytest.Session, every: Sequence[Group], numbers: int, feed: int
    ) -> None:
        self.reported: set[str] = set()
        self._running: tuple[str, Any] | None = None
        self._received = b""
        self._ended = False
        reports, told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(feed)
            os.close(reports)
            Child(session, every, numbers, told).run()
        os.close(told)
        self.reports = reports

    def read(self, session: pytest.Session) -> bool:
        """Pass on what it reports; return False when there is no more."""
        read = os.read(self.reports, 1 << 16)
        *lines, self._received = (self._received + read).split(b"\n")
        for line in lines:
            self._pass_on(session.config, *json.loads(line))
        self._ended = not read
        if self._ended and self._running:
            report = pytest.TestReport(
                *self._running, {}, "failed", f"process {self.pid} died in this test", "call"
            )
            session.config.hook.pytest_runtest_logreport(report=report)
        return not self._ended

    def _pass_on(self, config: pytest.Config, kind: str, data: Any, location: Any = None) -> None:
        match kind:
            case "start":
                self.reported.add(data)
                self._running = (data, tuple(location))
                config.hook.pytest_runtest_logstart(nodeid=data, location=self._running[1])
            case "report":
                if isinstance(data["longrepr"], list):  # of a skipped test, to JSON
                    data["longrepr"] = tuple(data["longrepr"])
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
            case "finish":
                config.hook.pytest_runtest_logfinish(nodeid=data, location=tuple(location))
                self._running = None

    def end(self) -> None:
        """Wait for its end, after an interrupt where it has not reported everything."""
        if not self._ended:
            os.kill(self.pid, signal.SIGINT)
        os.close(self.reports)
        os.waitpid(self.pid, 0)


class Child:
    """The forked process itself."""

    def __init__(
        self, session: pytest.Session, every: Sequence[Group], numbers: int, told: int
    ) -> None:
        self._session = session
        self._every = every
        self._numbers = numbers
        self._told = os.fdopen(told, "wb")

    def run(self) -> None:
        """Run groups until there are no more, then end."""
        plugins = self._session.config.pluginmanager
        status = 1
        try:
            # What it prints is captured by itself, and reported by the other process.
            capture = plugins.getplugin("capturemanager")
            capture.stop_global_capturing()
            capture.start_global_capturing()
            plugins.unregister(name="terminalreporter")
            plugins.register(self)
            self._run_groups()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)

    def _run_groups(self) -> None:
        hook, last = self._session.config.hook, None
        # The next test is known before one ends, so that fixtures both use are kept.
        for item in self._items():
            if last is not None:
                hook.pytest_runtest_protocol(item=last, nextitem=item)
            last = item
        if last is not None:
            hook.pytest_runtest_protocol(item=last, nextitem=None)

    def _items(self) -> Iterator[pytest.Item]:
        while number := os.read(self._numbers, NUMBER.size):
            yield from self._every[NUMBER.unpack(number)[0]]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Tell which test begins."""
        self._tell("start", nodeid, location)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Tell that it has ended."""
        self._tell("finish", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell how a part of it ended."""
        config = self._session.config
        self._tell(
            "report", config.hook.pytest_report_to_serializable(config=config, report=report)
        )

    def _tell(self, *message: Any) -> None:
        self._told.write(json.dumps(message).encode() + b"\n")
        self._told.flush()

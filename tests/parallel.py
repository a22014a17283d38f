"""Parallel tests: `--processes N` forks this process after all tests are collected.

Collection takes 12 seconds of CPU time, once for all processes. Each process reads the numbers
of small groups of tests from a pipe, and sends its reports through another pipe. Tests marked
`engine` or `browser` run afterwards, in one process for each set of tests that share engines.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import pytest

MAX_GROUP_TESTS = 16  # short groups end at about the same time
AFTERWARDS = ("engine", "browser")
# These take the longest, so they begin first.
FIRST = ("tests/prometheus/test_live.py", "tests/upstream/test_upstream_suite.py")
NUMBER = struct.Struct("I")
# Objects between two collections of garbage. With the default, 700, tests take a sixteenth longer.
GC_THRESHOLD = 50_000
INTERRUPTED_S = 5.0  # for a process to end after an interrupt
PR_SET_PDEATHSIG = 1  # of Linux's prctl

Group = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--processes", type=int, default=0, help="number of processes")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection: nearly everything stays, and it takes half the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Run the tests of few resources, then the others."""
    count: int = session.config.getoption("processes")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    afterwards = [item for item in session.items if any(map(item.get_closest_marker, AFTERWARDS))]
    excluded = set(afterwards)
    small = [*small_groups(item for item in session.items if item not in excluded)]
    small.sort(key=lambda group: not group[0].nodeid.startswith(FIRST))
    run_all(session, small, count)
    run_all(session, [*groups_by_engine(afterwards)], count)
    return True


def run_all(session: pytest.Session, all_groups: Sequence[Group], count: int) -> None:
    """Run groups, and the rest of a group again if its process died."""
    while all_groups:
        reported = run(session, all_groups, count)
        assert reported, "processes die outside of tests; see their output"
        left = ([item for item in group if item.nodeid not in reported] for group in all_groups)
        all_groups = [*filter(None, left)]


def stop_if_requested(session: pytest.Session) -> None:
    """End the session after a failure or a signal, as pytest's own loop does."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def small_groups(items: Iterable[pytest.Item]) -> Iterator[Group]:
    """Yield groups of tests, each of one file."""
    for _, tests in groupby(items, lambda item: item.path):
        while group := list(islice(tests, MAX_GROUP_TESTS)):
            yield group


def groups_by_engine(items: Iterable[pytest.Item]) -> Iterator[Group]:
    """Yield a group for each argument of the mark `engine`, and one of the tests without."""

    def engine(item: pytest.Item) -> str:
        mark = item.get_closest_marker("engine")
        return mark.args[0] if mark and mark.args else ""

    for _, tests in groupby(sorted(items, key=engine), engine):
        yield [*tests]


def run(session: pytest.Session, all_groups: Sequence[Group], count: int) -> set[str]:
    """Run groups in `count` processes, report each test, and return the ids of all that ran."""
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # shared by all
    numbers, feed = os.pipe()
    gc.collect()
    gc.freeze()
    running = [
        Process(session, all_groups, numbers, feed) for _ in range(min(count, len(all_groups)))
    ]
    os.close(numbers)
    try:
        os.write(feed, b"".join(map(NUMBER.pack, range(len(all_groups)))))
        os.close(feed)
        with selectors.DefaultSelector() as selector:
            for process in running:
                selector.register(process.reports, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    if not key.data.read(session):
                        selector.unregister(key.fileobj)
                stop_if_requested(session)
        return {nodeid for process in running for nodeid in process.reported}
    finally:
        gc.unfreeze()  # or nanobind reports leaks at the exit
        for process in running:
            process.interrupt()
        give_up = time.monotonic() + INTERRUPTED_S
        for process in running:
            process.wait(give_up)


class Process:
    """The parent's side of a forked process."""

    def __init__(
        self, session: pytest.Session, all_groups: Sequence[Group], numbers: int, feed: int
    ) -> None:
        self.reported: set[str] = set()
        self._running: tuple[str, Any] | None = None
        self._received = b""
        self._ended = False
        reports, output = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(feed)
            os.close(reports)
            Child(session, all_groups, numbers, output).run()
        os.close(output)
        self.reports = reports

    def read(self, session: pytest.Session) -> bool:
        """Pass on reports; return False after the last report."""
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
                if isinstance(data["longrepr"], list):  # a tuple before JSON, for a skipped test
                    data["longrepr"] = tuple(data["longrepr"])
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
            case "finish":
                config.hook.pytest_runtest_logfinish(nodeid=data, location=tuple(location))
                self._running = None

    def interrupt(self) -> None:
        """Interrupt the process if it still runs."""
        if not self._ended:
            os.kill(self.pid, signal.SIGINT)
        os.close(self.reports)

    def wait(self, give_up: float) -> None:
        """Wait for the process to end, and kill it if it does not."""
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > give_up:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)


class Child:
    """The forked process's own side."""

    def __init__(
        self, session: pytest.Session, all_groups: Sequence[Group], numbers: int, output: int
    ) -> None:
        self._session = session
        self._all_groups = all_groups
        self._numbers = numbers
        self._output = os.fdopen(output, "wb")

    def run(self) -> None:
        """Run groups until none is left, then exit."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also if the parent is killed
        plugins = self._session.config.pluginmanager
        gc.set_threshold(GC_THRESHOLD)
        status = 1
        try:
            # This process captures its own output; the parent process reports it.
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
        # pytest needs the next test, to keep the fixtures that both tests use.
        for item in self._items():
            if last is not None:
                hook.pytest_runtest_protocol(item=last, nextitem=item)
            last = item
        if last is not None:
            hook.pytest_runtest_protocol(item=last, nextitem=None)

    def _items(self) -> Iterator[pytest.Item]:
        while number := os.read(self._numbers, NUMBER.size):
            yield from self._all_groups[NUMBER.unpack(number)[0]]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Send the start of a test."""
        self._send("start", nodeid, location)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Send the end of a test."""
        self._send("finish", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of one phase of a test."""
        config = self._session.config
        self._send(
            "report", config.hook.pytest_report_to_serializable(config=config, report=report)
        )

    def _send(self, *message: Any) -> None:
        self._output.write(json.dumps(message).encode() + b"\n")
        self._output.flush()

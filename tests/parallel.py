"""Tests side by side: `--processes N` forks this process once all tests are collected.

Collecting takes half a minute of a processor, once, however many processes there are. Each process
takes small groups of tests, of one file each, from a pipe. It reports through another pipe.
One more process runs the tests that are marked `engine` or `browser`, which share what they start:
engines are mostly idle.
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
from dataclasses import dataclass
from itertools import groupby, islice
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
    """Run the tests of engines and browsers in one process, and the others in `count` more."""
    count: int = session.config.getoption("processes")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    left = session.items
    while left:
        alone: Group = []
        shared: Group = []
        for each in left:
            (alone if any(map(each.get_closest_marker, ALONE)) else shared).append(each)
        queues = [Queue([alone], 1)] if alone else []
        if shared:
            queues.append(Queue(list(groups(shared)), count))
        reported = run(session, queues)
        # The tests that a process had taken when it died are left.
        left = [each for each in left if each.nodeid not in reported]
        assert reported, "processes die outside of tests; their output says why"
    return True


def stop_where_asked(session: pytest.Session) -> None:
    """End the session where a failure or a signal asks for it, as pytest's own loop does."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


@dataclass(frozen=True)
class Queue:
    """Groups of tests, and the processes that take them."""

    groups: list[Group]
    processes: int


def groups(items: Sequence[pytest.Item]) -> Iterator[Group]:
    """Divide tests into groups of one file each."""
    for _, some in groupby(items, lambda item: item.path):
        while group := list(islice(some, GROUP_TESTS)):
            yield group


def run(session: pytest.Session, queues: Sequence[Queue]) -> set[str]:
    """Run all groups, report as each test ends, and return the tests that were reported."""
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
    gc.collect()
    gc.freeze()
    running = [process for queue in queues for process in start(session, queue)]
    try:
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


def start(session: pytest.Session, queue: Queue) -> list[Process]:
    """Start the processes of a queue and give them its numbers."""
    numbers, feed = os.pipe()
    count = min(queue.processes, len(queue.groups))
    started = [Process(session, queue, numbers, feed) for _ in range(count)]
    os.close(numbers)
    os.write(feed, b"".join(map(NUMBER.pack, range(len(queue.groups)))))
    os.close(feed)
    return started


class Process:
    """A forked process, as this one sees it."""

    def __init__(self, session: pytest.Session, queue: Queue, numbers: int, feed: int) -> None:
        self.reported: set[str] = set()
        self._running: tuple[str, Any] | None = None
        self._received = b""
        self._ended = False
        reports, told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(feed)
            os.close(reports)
            Child(session, queue, numbers, told).run()
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

    def __init__(self, session: pytest.Session, queue: Queue, numbers: int, told: int) -> None:
        self._session = session
        self._queue = queue
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
            yield from self._queue.groups[NUMBER.unpack(number)[0]]

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

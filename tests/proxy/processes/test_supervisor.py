"""The supervisor of server processes, from within."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.app import App, supervise
from proxy.config import FleetConfig, parse
from proxy.errors import ProxyError
from proxy.processes import ipc_requests, watchdog
from proxy.processes import supervisor as module
from proxy.processes.channel import Channel
from proxy.processes.child import Child
from proxy.processes.ipc_messages import ConfigReloaded, IpcQuestion, KnownWorker, WorkersChanged
from proxy.processes.server_process import ServerProcess
from proxy.processes.shared.process_sheet import ALIVE
from proxy.processes.shared.shared_memory import SharedTable
from proxy.processes.supervisor import Supervisor
from proxy.setup.secrets import SecretKeys
from proxy.wire import bind
from tests.proxy.core.making import spec
from tests.proxy.wire.site import eventually

DEADLINE_S = 240.0


def config(processes: int = 2, port: int = 0, more: str = "") -> FleetConfig:
    return parse(
        "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n"
        f"router: {{{more}port: {port}, admin: {{port: 0}}, processes: {processes}}}\n",
        "fleet.yaml",
    )


@asynccontextmanager
async def running(
    settings: FleetConfig, *, first_question: object = None
) -> AsyncIterator[Supervisor]:
    """Run a supervisor within the block; its processes get this question first."""
    supervisor = Supervisor(settings, None)
    if first_question is not None:
        supervisor._logs = IpcQuestion(1, "logs", first_question)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()
    assert supervisor.pids == []


def script_of(folder: Path, command: str) -> str:
    """Write a program that runs instead of Python."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)
    return str(script)


async def test_hung_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes' first message is invalid, which ends none of them."""
    monkeypatch.setattr(watchdog, "HANG_S", 2.0)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(ipc_requests, "ANSWER_S", 1.0)
    async with running(config(), first_question="not valid") as supervisor:
        pids = supervisor.pids
        assert (len(pids), supervisor.restarts) == (2, 0)
        os.kill(pids[0], signal.SIGSTOP)
        # Questions do not wait for its answers.
        assert set(await supervisor.gather(IpcQuestion(1, "page"))) == {1}
        await eventually(lambda: supervisor.restarts == 1, within=DEADLINE_S)
        await eventually(lambda: len(supervisor.pids) == 2, within=DEADLINE_S)
        assert pids[0] not in supervisor.pids


async def test_new_process_gets_log_settings_until_a_reload() -> None:
    received: dict[int, list[object]] = {0: [], 1: []}
    supervisor = Supervisor(config(), None)
    for index, messages in received.items():
        child = Child(index, cast("Process", SimpleNamespace(pid=index)))
        child.channel = cast("Channel", SimpleNamespace(send=messages.append))
        child.serving = index == 0
        supervisor._children[index] = child
    leader = supervisor._children[0]
    supervisor._handle(leader, IpcQuestion(1, "logs", (True, {"": "debug"})))
    supervisor._handle(leader, IpcQuestion(2, "logs", (None, {"proxy": "error"})))
    supervisor._handle(leader, IpcQuestion(3, "logs", (False, {})))
    assert received[1] == [
        IpcQuestion(0, "logs", (True, {"": "debug"})),
        IpcQuestion(0, "logs", (True, {"": "debug", "proxy": "error"})),
        IpcQuestion(0, "logs", (False, {"": "debug", "proxy": "error"})),
    ]
    supervisor._handle(leader, ConfigReloaded(config(), SecretKeys({}, None, {})))
    supervisor._handle(leader, IpcQuestion(4, "logs", (None, {"proxy": "info"})))
    assert received[1][-1] == IpcQuestion(0, "logs", (None, {"proxy": "info"}))
    for task in supervisor._tasks:
        task.cancel()
    await asyncio.gather(*supervisor._tasks, return_exceptions=True)
    assert received[0] == []


async def test_process_killed_during_the_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    start_process, may_begin = asyncio.create_subprocess_exec, asyncio.Event()

    async def delay_second(*args: str, **named: Any) -> asyncio.subprocess.Process:
        if args[3] == "1":
            await may_begin.wait()
        return await start_process(*args, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", delay_second)
    supervisor = Supervisor(config(), None)
    starting = asyncio.create_task(supervisor.start())
    try:
        children = supervisor._children
        await eventually(lambda: children and children[0].serving, within=DEADLINE_S)
        os.kill(supervisor.pids[0], signal.SIGKILL)
        await eventually(lambda: supervisor.restarts == 1, within=DEADLINE_S)
        may_begin.set()
        await starting
        assert len(supervisor.pids) == 2
    finally:
        await supervisor.stop()


async def test_failed_restarts_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of processes that cannot start, and of those that never serve."""
    start_process, failures = asyncio.create_subprocess_exec, 0

    async def fail_twice(*args: Any, **named: Any) -> asyncio.subprocess.Process:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start_process(*args, **named)

    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    async with running(config(1)) as supervisor:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_twice)
        with monkeypatch.context() as stuck, caplog.at_level(logging.ERROR):
            stuck.setattr(watchdog, "START_TIMEOUT_S", 0.2)
            stuck.setattr(module.sys, "executable", script_of(tmp_path, "exec sleep 1000"))
            os.kill(supervisor.pids[0], signal.SIGKILL)
            await eventually(lambda: supervisor.restarts == 3, within=DEADLINE_S)
        assert caplog.text.count("cannot start: [Errno 11]") == failures == 2
        assert len(re.findall(r"does not serve after \d+ s; killing it", caplog.text)) >= 2
        pauses = re.findall(r"(restarting|again) in (\S+) s", caplog.text)
        assert [pause_s for _, pause_s in pauses] == ["0.05", "0.1", "0.2", "0.4", "0.8"]
        # For a process started meanwhile.
        monkeypatch.setattr(watchdog, "START_TIMEOUT_S", DEADLINE_S / 3)
        children = supervisor._children.values
        await eventually(
            lambda: [child.serving for child in children()] == [True], within=DEADLINE_S
        )


async def test_failed_first_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(ProxyError, match="Resource temporarily unavailable"):
        await Supervisor(config(), None).start()


async def test_no_process_is_killed_after_a_pause_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of the container, checks are late and marks are old."""
    now, killed = 1000.0, asyncio.Event()
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(watchdog, "HANG_S", 0.1)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    supervisor = Supervisor(config(), None)
    supervisor._table = SharedTable.make(1)
    supervisor._table.sheet(0).write_count(ALIVE, 1000)
    child = SimpleNamespace(index=0, serving=True, process=SimpleNamespace(kill=killed.set))
    checks = 0

    class Children(dict[int, Any]):
        def values(self) -> Any:
            nonlocal checks
            checks += 1
            return super().values()

    supervisor._children = Children({0: child})
    watching = asyncio.create_task(watchdog.kill_hung(supervisor._children, supervisor._table))
    try:
        for moment in (1000.0, 1100.0):  # frozen in between
            now, seen = moment, checks
            await eventually(lambda: checks > seen + 2)  # noqa: B023
        assert not killed.is_set()
        while not killed.is_set() and now < 1101:
            now, seen = now + 0.002, checks
            await eventually(lambda: checks > seen)  # noqa: B023
        assert 1100.1 < now < 1100.2, "the process has not moved since"
    finally:
        watching.cancel()
        supervisor._table.close()


async def test_failed_watch_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> None:
        raise RuntimeError("an internal error")

    member = ServerProcess.__new__(ServerProcess)
    stub: Any = member
    stub._tasks, stub.ended, stub.failed = set(), asyncio.Event(), False
    stub.app = SimpleNamespace(open_admin=lambda _: None)
    stub._channel = SimpleNamespace(send=lambda _: None)
    stub._watch, stub._limiter = watch, None
    async with asyncio.timeout(DEADLINE_S):
        await member.run(stub)
    assert member.failed
    assert "Traceback" in caplog.text
    assert "an internal error" in caplog.text


async def test_keys_of_added_workers_are_hidden_in_logs() -> None:
    member = ServerProcess.__new__(ServerProcess)
    stub: Any = member
    stub.app, stub._listens = App(config()), True
    stub._replica = SimpleNamespace(apply=lambda _: None)
    added = replace(spec("added"), api_key="of-this-worker")
    known = KnownWorker(added, None, 0.0, True, True, 0.0, 0.0, False, (), None, None, None)
    member.handle(WorkersChanged((known,)))
    record = logging.makeLogRecord({"msg": "sent of-this-worker"})
    assert stub.app.logs.line_of(record, "").endswith(b"sent ***\n")


async def test_start_waits_for_occupied_ports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bind, "MAX_WAIT_S", DEADLINE_S)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervisor = Supervisor(config(1, port), None)
        starting = asyncio.create_task(supervisor.start())
        await eventually(lambda: "may still drain" in caplog.text)
        assert str(port) in caplog.text
    await starting
    try:
        assert supervisor.url.endswith(f":{port}")
        assert caplog.text.count("may still drain") == 1
    finally:
        await supervisor.stop()


async def test_impossible_address_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "MAX_WAIT_S", 2 * DEADLINE_S)
    supervisor = Supervisor(config(more="host: 192.0.2.1, allow_anonymous: true, "), None)
    with pytest.raises(ProxyError, match="choose another host or port"):
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.start()


async def test_processes_that_end_at_once_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "executable", script_of(tmp_path, "exit 3"))
    with pytest.raises(ProxyError, match="before it served"):
        await supervise(config())

"""The supervisor of server processes, from within."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from proxy.app import App, supervise
from proxy.config import FleetConfig, parse
from proxy.errors import ProxyError
from proxy.processes import ipc_requests, watchdog
from proxy.processes import supervisor as module
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

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from proxy.processes.channel import Channel

DEADLINE_S = 240.0


def config(processes: int | str = 2, port: int = 0) -> FleetConfig:
    """Return a config with this number of processes."""
    return parse(
        "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n"
        f"router: {{port: {port}, admin: {{port: 0}}, processes: {processes}}}\n",
        "fleet.yaml",
    )


async def test_hung_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HANG_S", 2.0)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(ipc_requests, "ANSWER_S", 1.0)
    supervisor = Supervisor(config(), None)
    await supervisor.start()
    try:
        pids = supervisor.pids
        os.kill(pids[0], signal.SIGSTOP)
        # Questions do not wait for its answers.
        assert set(await supervisor.gather(IpcQuestion(1, "page"))) == {1}
        await eventually(lambda: supervisor.restarts == 1, within=DEADLINE_S)
        await eventually(lambda: len(supervisor.pids) == 2, within=DEADLINE_S)
        assert pids[0] not in supervisor.pids
    finally:
        await supervisor.stop()
    assert supervisor.pids == []


async def test_invalid_first_message_does_not_end_the_process() -> None:
    supervisor = Supervisor(config(1), None)
    supervisor._logs = IpcQuestion(1, "logs", "not valid")
    await supervisor.start()
    try:
        assert (len(supervisor.pids), supervisor.restarts) == (1, 0)
        assert set(await supervisor.gather(IpcQuestion(2, "page"))) == {0}
    finally:
        await supervisor.stop()


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


async def test_process_that_never_serves_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    supervisor = Supervisor(config(1), None)
    await supervisor.start()
    try:
        with monkeypatch.context() as stuck, caplog.at_level(logging.ERROR):
            stuck.setattr(watchdog, "START_TIMEOUT_S", 0.2)
            stuck.setattr(module.sys, "executable", str(script))
            os.kill(supervisor.pids[0], signal.SIGKILL)
            await eventually(lambda: supervisor.restarts == 3, within=DEADLINE_S)
        assert len(re.findall(r"does not serve after \d+ s; killing it", caplog.text)) >= 2
        for pause_s in (0.05, 0.1, 0.2):
            assert f"restarting in {pause_s} s" in caplog.text
        monkeypatch.setattr(
            watchdog, "START_TIMEOUT_S", DEADLINE_S / 3
        )  # for a process started meanwhile
        children = supervisor._children.values
        await eventually(
            lambda: [child.serving for child in children()] == [True], within=DEADLINE_S
        )
    finally:
        await supervisor.stop()
    assert supervisor.pids == []


async def test_failed_restart_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_process, failures = asyncio.create_subprocess_exec, 0

    async def fail_twice(*args: Any, **named: Any) -> asyncio.subprocess.Process:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start_process(*args, **named)

    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    supervisor = Supervisor(config(1), None)
    await supervisor.start()
    try:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_twice)
        with caplog.at_level(logging.ERROR):
            os.kill(supervisor.pids[0], signal.SIGKILL)
            await eventually(lambda: failures == 2, within=DEADLINE_S)
            await eventually(lambda: len(supervisor.pids) == 1, within=DEADLINE_S)
        assert caplog.text.count("cannot start: [Errno 11]") == 2
    finally:
        await supervisor.stop()


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
    supervisor = Supervisor(
        parse(
            "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n"
            "router: {host: 192.0.2.1, allow_anonymous: true, admin: {port: 0}, processes: 2}\n",
            "fleet.yaml",
        ),
        None,
    )
    with pytest.raises(ProxyError, match="choose another host or port"):
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.start()


async def test_processes_that_end_at_once_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(script))
    with pytest.raises(ProxyError, match="before it served"):
        await supervise(config())

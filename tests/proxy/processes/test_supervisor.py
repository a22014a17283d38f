"""Who keeps the processes: what only shows from within."""

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
from proxy.processes.shared.shared_memory import ALIVE, SharedTable
from proxy.processes.supervisor import Supervisor
from proxy.setup.secrets import SecretKeys
from proxy.wire import bind
from tests.proxy.core.making import spec
from tests.proxy.wire.site import eventually

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from proxy.processes.channel import Channel

DEADLINE_S = 60.0


def config(processes: int | str = 2, port: int = 0) -> FleetConfig:
    """Describe a router of so many."""
    return parse(
        "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n"
        f"router: {{port: {port}, admin: {{port: 0}}, processes: {processes}}}\n",
        "fleet.yaml",
    )


async def test_one_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HANG_S", 2.0)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(ipc_requests, "ANSWER_S", 1.0)
    kept = Supervisor(config(), None)
    await kept.start()
    try:
        pids = kept.pids
        os.kill(pids[0], signal.SIGSTOP)
        # Meanwhile nobody waits for its answers.
        assert set(await kept.gather(IpcQuestion(1, "page"))) == {1}
        await eventually(lambda: kept.restarts == 1, within=DEADLINE_S)
        await eventually(lambda: len(kept.pids) == 2, within=DEADLINE_S)
        assert pids[0] not in kept.pids
    finally:
        await kept.stop()
    assert kept.pids == []


async def test_what_can_t_be_done_with_the_first_words_ends_no_process() -> None:
    kept = Supervisor(config(1), None)
    kept._logs = IpcQuestion(1, "logs", "nothing of the kind")
    await kept.start()
    try:
        assert (len(kept.pids), kept.restarts) == (1, 0)
        assert set(await kept.gather(IpcQuestion(2, "page"))) == {0}
    finally:
        await kept.stop()


async def test_who_begins_is_told_what_is_logged_until_the_file_is_read_again() -> None:
    told: dict[int, list[object]] = {0: [], 1: []}
    kept = Supervisor(config(), None)
    for index, heard in told.items():
        child = Child(index, cast("Process", SimpleNamespace(pid=index)))
        child.channel = cast("Channel", SimpleNamespace(send=heard.append))
        child.serving = index == 0
        kept._children[index] = child
    leader = kept._children[0]
    kept._handle(leader, IpcQuestion(1, "logs", (True, {"": "debug"})))
    kept._handle(leader, IpcQuestion(2, "logs", (None, {"proxy": "error"})))
    kept._handle(leader, IpcQuestion(3, "logs", (False, {})))
    assert told[1] == [
        IpcQuestion(0, "logs", (True, {"": "debug"})),
        IpcQuestion(0, "logs", (True, {"": "debug", "proxy": "error"})),
        IpcQuestion(0, "logs", (False, {"": "debug", "proxy": "error"})),
    ]
    kept._handle(leader, ConfigReloaded(config(), SecretKeys({}, None, {})))
    kept._handle(leader, IpcQuestion(4, "logs", (None, {"proxy": "info"})))
    assert told[1][-1] == IpcQuestion(0, "logs", (None, {"proxy": "info"}))
    for task in kept._tasks:
        task.cancel()
    await asyncio.gather(*kept._tasks, return_exceptions=True)
    assert told[0] == []


async def test_one_killed_during_the_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, may_begin = asyncio.create_subprocess_exec, asyncio.Event()

    async def one_late(*args: str, **named: Any) -> asyncio.subprocess.Process:
        if args[3] == "1":
            await may_begin.wait()
        return await begin(*args, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", one_late)
    kept = Supervisor(config(), None)
    starting = asyncio.create_task(kept.start())
    try:
        children = kept._children
        await eventually(lambda: children and children[0].serving, within=DEADLINE_S)
        os.kill(kept.pids[0], signal.SIGKILL)
        await eventually(lambda: kept.restarts == 1, within=DEADLINE_S)
        may_begin.set()
        await starting
        assert len(kept.pids) == 2
    finally:
        await kept.stop()


async def test_one_that_begins_and_never_serves_is_killed_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    kept = Supervisor(config(), None)
    await kept.start()
    try:
        with monkeypatch.context() as stuck, caplog.at_level(logging.ERROR):
            stuck.setattr(watchdog, "START_TIMEOUT_S", 0.2)
            stuck.setattr(module.sys, "executable", str(script))
            os.kill(kept.pids[0], signal.SIGKILL)
            await eventually(lambda: kept.restarts == 3, within=DEADLINE_S)
        assert len(re.findall(r"does not serve after \d+ s; killing it", caplog.text)) >= 2
        for pause_s in (0.05, 0.1, 0.2):
            assert f"restarting in {pause_s} s" in caplog.text
        monkeypatch.setattr(
            watchdog, "START_TIMEOUT_S", DEADLINE_S / 3
        )  # one more may have begun so
        serve = kept._children.values
        await eventually(
            lambda: [each.serving for each in serve()] == [True] * 2, within=DEADLINE_S
        )
    finally:
        await kept.stop()
    assert kept.pids == []


async def test_one_that_can_not_begin_again_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, failures = asyncio.create_subprocess_exec, 0

    async def now_and_then(*args: Any, **named: Any) -> asyncio.subprocess.Process:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await begin(*args, **named)

    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    kept = Supervisor(config(), None)
    await kept.start()
    try:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", now_and_then)
        with caplog.at_level(logging.ERROR):
            os.kill(kept.pids[0], signal.SIGKILL)
            await eventually(lambda: failures == 2, within=DEADLINE_S)
            await eventually(lambda: len(kept.pids) == 2, within=DEADLINE_S)
        assert caplog.text.count("cannot start: [Errno 11]") == 2
    finally:
        await kept.stop()


async def test_a_first_start_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
    with pytest.raises(ProxyError, match="Resource temporarily unavailable"):
        await Supervisor(config(), None).start()


async def test_after_a_pause_of_all_none_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a container was paused: the looks come late, and the marks are old."""
    now, killed = 1000.0, asyncio.Event()
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(watchdog, "HANG_S", 0.1)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    kept = Supervisor(config(), None)
    kept._table = SharedTable.make(1)
    kept._table.sheet(0).write_count(ALIVE, 1000)
    child = SimpleNamespace(index=0, serving=True, process=SimpleNamespace(kill=killed.set))
    looks = 0

    class Children(dict[int, Any]):
        def values(self) -> Any:
            nonlocal looks
            looks += 1
            return super().values()

    kept._children = Children({0: child})
    watching = asyncio.create_task(watchdog.kill_hung(kept._children, kept._table))
    try:
        for moment in (1000.0, 1100.0):  # frozen in between
            now, seen = moment, looks
            await eventually(lambda: looks > seen + 2)  # noqa: B023
        assert not killed.is_set()
        while not killed.is_set() and now < 1101:
            now, seen = now + 0.002, looks
            await eventually(lambda: looks > seen)  # noqa: B023
        assert 1100.1 < now < 1100.2, "it has not moved since either"
    finally:
        watching.cancel()
        kept._table.close()


async def test_a_failed_watch_ends_its_process(caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> None:
        raise RuntimeError("a mistake of ours")

    member = ServerProcess.__new__(ServerProcess)
    stub: Any = member
    stub._tasks, stub.ended, stub.failed = set(), asyncio.Event(), False
    stub.app = SimpleNamespace(open_admin=lambda _: None)
    stub._channel = SimpleNamespace(send=lambda _: None)
    stub._watch = watch
    async with asyncio.timeout(5):
        await member.run(stub)
    assert member.failed
    assert "Traceback" in caplog.text
    assert "a mistake of ours" in caplog.text


async def test_keys_of_workers_that_the_leader_was_given_are_in_no_log() -> None:
    member = ServerProcess.__new__(ServerProcess)
    stub: Any = member
    stub.app, stub._listens = App(config()), True
    stub._replica = SimpleNamespace(take=lambda _: None)
    added = replace(spec("added"), api_key="of-this-worker")
    known = KnownWorker(added, None, 0.0, True, True, 0.0, 0.0, False, (), None, None, None)
    member.handle(WorkersChanged((known,)))
    record = logging.makeLogRecord({"msg": "sent of-this-worker"})
    assert stub.app.logs.line_of(record, "").endswith(b"sent ***\n")


async def test_ports_that_are_let_go_in_time_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bind, "MAX_WAIT_S", DEADLINE_S)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        kept = Supervisor(config(1, port), None)
        starting = asyncio.create_task(kept.start())
        await eventually(lambda: "may still drain" in caplog.text)
        assert str(port) in caplog.text
    await starting
    try:
        assert kept.url.endswith(f":{port}")
        assert caplog.text.count("may still drain") == 1
    finally:
        await kept.stop()


async def test_an_impossible_port_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "MAX_WAIT_S", 2 * DEADLINE_S)
    kept = Supervisor(
        parse(
            "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n"
            "router: {host: 192.0.2.1, allow_anonymous: true, admin: {port: 0}, processes: 2}\n",
            "fleet.yaml",
        ),
        None,
    )
    with pytest.raises(ProxyError, match="choose another host or port"):
        async with asyncio.timeout(DEADLINE_S):
            await kept.start()


async def test_processes_that_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(script))
    with pytest.raises(ProxyError, match="before it served"):
        await supervise(config())

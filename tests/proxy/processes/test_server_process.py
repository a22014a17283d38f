"""One server process without its supervisor."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import cast

import pytest

from proxy.config import FleetConfig, load, parse
from proxy.metrics.recent import ANY
from proxy.processes.channel import Channel
from proxy.processes.ipc_messages import (
    Begin,
    Drain,
    IpcAnswer,
    IpcQuestion,
    Message,
    QuestionKind,
    Stop,
    WorkerDrained,
    WorkersChanged,
)
from proxy.processes.server_process import ServerProcess
from proxy.processes.shared.shared_memory import SharedTable
from proxy.setup.secrets import SecretKeys
from tests.proxy.core.making import make_info
from tests.proxy.metrics.finished import finished
from tests.proxy.wire.site import eventually

CONFIG = parse("model: m\nworkers: [{name: x, url: 'http://x'}]\n", "fleet.yaml")


def ignore(*_: Message) -> None: ...


def make_server(
    config: FleetConfig = CONFIG,
    channel: object = SimpleNamespace(send=ignore),
    processes: int = 1,
) -> ServerProcess:
    """Return the first process of a router."""
    keys = SecretKeys.read(config, "fleet.yaml")
    begin = Begin(processes, config, config, keys, None, load, ())
    return ServerProcess(begin, 0, SharedTable.make(processes).fd, cast("Channel", channel))


@pytest.fixture
async def server() -> AsyncIterator[ServerProcess]:
    """Return a process; its log takes the handlers over before a test starts."""
    server = make_server()
    yield server
    server.app.logs.close()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Awaitable[tuple[Channel, Channel]]]]:
    """Return a function that makes both ends of a channel, given what handles their messages."""
    ends: list[Channel] = []

    async def connected(*handlers: Callable[[Message], None]) -> tuple[Channel, Channel]:
        for sock, handle in zip(socket.socketpair(), handlers, strict=True):
            ends.append(await Channel.open(sock, handle, ignore))
        return ends[0], ends[1]

    yield connected
    for end in ends:
        end.close()


@pytest.mark.parametrize("draining", [True, False])
async def test_drain_is_sent_before_the_admin_api_responds(draining: bool) -> None:
    """The next look at changes is up to 15 ms away."""
    sent: list[Message] = []
    server = make_server(channel=SimpleNamespace(send=sent.append), processes=2)
    server.app.logs.close()
    server.app.is_leader = True
    server.app.fleet.roster.drain("x", draining=not draining)
    server._send_changes()
    sent.clear()
    server.app.fleet.roster.drain("x", draining=draining)
    server.app.report_drain("x", draining=draining, at_once=False)
    [changed, drained] = sent
    assert isinstance(changed, WorkersChanged)
    assert [worker.draining for worker in changed.known] == [draining]
    assert drained == WorkerDrained("x", draining, False)


QUESTIONS = {
    "page": ("metrics.tenants.show", None),
    "live": ("live.recorder.update", None),
    "logs": ("logs.change", (True, {})),
    "decisions": ("metrics.recent.newest", (1, ANY)),
}


@pytest.mark.parametrize("kind", QUESTIONS)
async def test_failed_question_does_not_end_the_process(
    server: ServerProcess,
    kind: QuestionKind,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: asyncio.Queue[Message] = asyncio.Queue()
    server._channel = cast("Channel", SimpleNamespace(send=sent.put_nowait))

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    place, given = QUESTIONS[kind]
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        *owner, name = place.split(".")
        patch.setattr(attrgetter(".".join(owner))(server.app), name, fails)
        server.handle(IpcQuestion(1, kind, given))
        await asyncio.gather(*server._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for the callback of the task
    assert f"process 0 cannot answer: {kind}" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert not server.ended.is_set()
    assert not server.failed
    assert await sent.get() == IpcAnswer(1, failed=True)
    server.handle(IpcQuestion(2, "page"))
    answer = await sent.get()
    assert isinstance(answer, IpcAnswer)
    assert answer.number == 2


async def test_unpicklable_answer_does_not_end_the_process(
    server: ServerProcess, connect: Callable[..., Awaitable[tuple[Channel, Channel]]]
) -> None:
    """Only the write finds it."""
    received: asyncio.Queue[Message] = asyncio.Queue()
    server._channel, _ = await connect(ignore, received.put_nowait)
    recent = server.app.metrics.recent
    recent._clock = cast("Callable[[], float]", lambda: lambda: None)
    recent.add(make_info(), None, finished())
    server.handle(IpcQuestion(1, "decisions", (1, ANY)))
    assert await asyncio.wait_for(received.get(), 5.0) == IpcAnswer(1, failed=True)
    assert not server.ended.is_set()


async def test_failing_message_handler_does_not_end_the_process(
    connect: Callable[..., Awaitable[tuple[Channel, Channel]]], caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[Message] = []

    def record_and_fail(message: Message) -> None:
        handled.append(message)
        raise ZeroDivisionError

    here, there = await connect(record_and_fail, ignore)
    with caplog.at_level(logging.ERROR):
        here.handle(Stop())
        there.send(Drain())
        there.send(Stop())
        await eventually(lambda: len(handled) == 3)
    assert handled == [Stop(), Drain(), Stop()]
    assert caplog.text.count("a message of another process") == 3

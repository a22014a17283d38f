"""One of several processes, without the others."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from operator import attrgetter
from typing import cast

import pytest

from proxy.config import load, parse
from proxy.processes.channel import Channel
from proxy.processes.ipc_messages import (
    Begin,
    Drain,
    IpcAnswer,
    IpcNoAnswer,
    IpcQuestion,
    Message,
    Stop,
    What,
)
from proxy.processes.server_process import ServerProcess
from proxy.processes.shared.shared_memory import SharedTable
from proxy.setup.secrets import SecretKeys
from tests.proxy.core.making import ask
from tests.proxy.metrics.finished import finished
from tests.proxy.wire.site import eventually

CONFIG = parse("model: m\nworkers: [{name: x, url: 'http://x'}]\n", "fleet.yaml")


class Line:
    """What a member says to its supervisor."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.send = self.sent.put_nowait


@pytest.fixture
async def member() -> AsyncIterator[ServerProcess]:
    table = SharedTable.make(1)
    keys = SecretKeys.read(CONFIG, "fleet.yaml")
    begin = Begin(1, CONFIG, CONFIG, keys, None, load, ())
    member = ServerProcess(begin, 0, table.fd, cast("Channel", Line()))
    yield member
    member.app.logs.close()


def deaf(_: Message) -> None:
    """Hear, and do nothing."""


def lost() -> None:
    """Hear of the end of a line."""


WHAT = {
    "page": ("metrics.tenants.show", None),
    "minute": ("live.notes.part", None),
    "logs": ("logs.change", (True, {})),
    "decisions": ("recent.newest", (1, {})),
}


@pytest.mark.parametrize("what", WHAT)
async def test_what_can_t_be_answered_ends_no_process(
    member: ServerProcess,
    what: What,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = cast("Line", member._channel).sent

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    place, given = WHAT[what]
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        *whose, name = place.split(".")
        patch.setattr(attrgetter(".".join(whose))(member.app), name, fails)
        member.handle(IpcQuestion(1, what, given))
        await asyncio.gather(*member._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for who is told of its end
    assert f"process 0 cannot answer: {what}" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert not member.ended.is_set()
    assert not member.failed
    assert await sent.get() == IpcNoAnswer(1)
    member.handle(IpcQuestion(2, "page"))
    answer = await sent.get()
    assert isinstance(answer, IpcAnswer)
    assert answer.number == 2


async def test_nor_does_what_can_t_be_told_on() -> None:
    """Which is found as late as it is written."""
    table, keys = SharedTable.make(1), SecretKeys.read(CONFIG, "fleet.yaml")
    ours, theirs = socket.socketpair()
    handled: asyncio.Queue[Message] = asyncio.Queue()
    there = await Channel.open(ours, handled.put_nowait, lost)
    here = await Channel.open(theirs, deaf, lost)
    member = ServerProcess(Begin(1, CONFIG, CONFIG, keys, None, load, ()), 0, table.fd, here)
    recent = member.app.recent
    recent._clock = cast("Callable[[], float]", lambda: lambda: None)
    recent.add(ask(), None, finished())
    member.handle(IpcQuestion(1, "decisions", (1, {})))
    assert await asyncio.wait_for(handled.get(), 5.0) == IpcNoAnswer(1)
    assert not member.ended.is_set()
    for channel in (here, there):
        channel.close()
    member.app.logs.close()


async def test_nor_does_a_message_that_can_t_be_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Be it one that came with the first, before there was anybody to hear it."""
    ours, theirs = socket.socketpair()
    handled: list[Message] = []

    def hear(message: Message) -> None:
        handled.append(message)
        raise ZeroDivisionError

    there = await Channel.open(ours, deaf, lost)
    here = await Channel.open(theirs, hear, lost)
    with caplog.at_level(logging.ERROR):
        here.take(Stop())
        there.send(Drain())
        there.send(Stop())
        await eventually(lambda: len(handled) == 3)
    assert handled == [Stop(), Drain(), Stop()]
    assert caplog.text.count("a message of another process") == 3
    for channel in (here, there):
        channel.close()

"""One of several processes, without the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import cast

import pytest

from proxy.config import load, parse
from proxy.control.keys import Keys
from proxy.processes.channel import Channel
from proxy.processes.member import Member
from proxy.processes.messages import Answer, Ask, Begin, Message
from proxy.processes.table import Table

CONFIG = parse("model: m\nworkers: [{name: x, url: 'http://x'}]\n", "fleet.yaml")


class Line:
    """What a member says to its supervisor."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.say = self.said.put_nowait


@pytest.fixture
async def member() -> AsyncIterator[Member]:
    table = Table.make(1)
    keys = Keys.read(CONFIG, "fleet.yaml")
    begin = Begin(1, CONFIG, CONFIG, keys, None, load, ())
    member = Member(begin, 0, table.fd, cast("Channel", Line()))
    yield member
    member.app.logs.close()


async def test_a_page_that_can_t_be_written_ends_no_process(
    member: Member, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = cast("Line", member._channel).said

    async def fails() -> tuple[bytes, str]:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(member.app.metrics, "page", fails)
        member.heard(Ask(1, "page"))
        await asyncio.gather(*member._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for who is told of its end
    assert not member.ended.is_set()
    assert not member.failed
    member.heard(Ask(2, "page"))
    answer = await said.get()
    assert isinstance(answer, Answer)
    assert answer.number == 2

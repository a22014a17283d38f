"""Streams of vLLM's server that go on from another server, which gets the first tokens at once."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from proxy.http.sent_text import SentText, TextDiffersError
from tests.engine.parsed import EXACT, EXACT_CHATS, INEXACT, Model
from tests.proxy.http.agent_streams import read_chat, read_message

CUTS = 12


class Streams:
    """A stream, and those that go on from another server."""

    def __init__(self, model: Model, events: list[tuple[int, bytes]], messages: bool) -> None:
        self._model = model
        self._events = events
        self._messages = messages
        self.whole = self.read([event for _, event in events])
        assert self.whole[-1] == 1
        tokens = len(model.tokens)
        self.cuts = range(2, tokens, max(1, tokens // CUTS))

    async def cut(self, tokens: int) -> Any:
        """Return what a client gets whose server fails after so many tokens."""
        got = [event for count, event in self._events if count <= tokens]
        sent = SentText(deque(got), messages=self._messages)
        assert not sent.other_output
        rest = sent.rest()
        events = await self._model.stream(tokens + 1, messages=self._messages)
        return self.read([*got, *(rest.feed(event) for _, event in events)])

    def read(self, events: list[bytes]) -> tuple[list[list[str]], Any, Any, int]:
        """Return output, reason of the end, usage and whether the stream is complete."""
        output, got = (read_message if self._messages else read_chat)(b"".join(events))
        return output, got["finish"], got["usage"], got["done"]


async def streams_of(model: Model, messages: bool) -> Streams:
    return Streams(model, await model.stream(1, messages=messages), messages)


@pytest.mark.parametrize("messages", [False, True], ids=["chat", "messages"])
@pytest.mark.parametrize("name", EXACT)
async def test_agents_get_the_whole_output_once(name: str, messages: bool) -> None:
    streams = await streams_of(EXACT[name], messages)
    assert len(streams.whole[0]) > 1
    for cut in streams.cuts:
        assert await streams.cut(cut) == streams.whole


@pytest.mark.parametrize("name", EXACT_CHATS)
async def test_chats_get_the_text_between_two_calls_once(name: str) -> None:
    streams = await streams_of(EXACT_CHATS[name], False)
    assert len(streams.whole[0]) > 2
    for cut in streams.cuts:
        assert await streams.cut(cut) == streams.whole


@pytest.mark.parametrize(
    ("name", "messages"),
    [*((name, True) for name in EXACT_CHATS | INEXACT), *((name, False) for name in INEXACT)],
)
async def test_output_that_differs_is_an_error(name: str, messages: bool) -> None:
    streams = await streams_of((EXACT_CHATS | INEXACT)[name], messages)
    errors = 0
    for cut in streams.cuts:
        try:
            found = await streams.cut(cut)
        except TextDiffersError:
            errors += 1
        else:
            assert found == streams.whole
    assert 0 < errors < len(streams.cuts)

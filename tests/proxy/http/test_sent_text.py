"""The text that a client has, and the rest of it from another worker."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from proxy.http.sent_text import (
    MAX_CONTENT,
    MAX_LAST_PIECES,
    EngineFailedError,
    SentText,
    TextDiffersError,
)
from tests.proxy.http.agent_streams import chat_event, message_steps, read_chat
from tests.proxy.wire.scripts import chunk


def event(text: str | None, finish: str | None = None, **delta: Any) -> bytes:
    return chat_event({**({} if text is None else {"content": text}), **delta}, finish)


def text_in(events: bytes) -> str:
    [[kind, text]] = read_chat(events)[0] or [["content", ""]]
    assert kind == "content"
    return text


def sent(*pieces: str, condense_at: int = 0) -> SentText:
    found = SentText(deque([event(None, role="assistant")]))
    for number, piece in enumerate(pieces):
        found.pieces.append(chunk(event(piece)))
        if number == condense_at:
            found.condense()
    return found


def test_the_end_may_be_all_that_is_new() -> None:
    rest = sent("one", "two").rest()
    assert text_in(rest.feed(event("onetwo", "length"))) == ""
    assert rest.is_caught_up
    rest = sent("one", "two").rest()
    assert rest.feed(event("onetwo")) == b""
    assert rest.is_caught_up
    assert rest.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


def test_nothing_sent_means_that_all_text_is_new() -> None:
    rest = sent().rest()
    assert rest.feed(event(None, role="assistant", content="")) == b""
    assert text_in(rest.feed(event("one") + event("two"))) == "onetwo"


@pytest.mark.parametrize(
    "other",
    [
        event("onetwx"),
        event("xx") + event("xxxx"),
        event("one", "stop"),
        event("one") + b"data: [DONE]\n\n",
        event(None, reasoning="hm") + event("on", "stop"),
        event(None, tool_calls=["x"]),
        b"data: {\n\n",
    ],
)
def test_another_text_is_an_error(other: bytes) -> None:
    with pytest.raises(TextDiffersError):
        sent("one", "two").rest().feed(other)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (b'data: {"error": {"message": "the engine died", "code": 500}}\n\n', "the engine died"),
        (
            b'event: error\ndata: {"type": "error", "error": {"message": "no \\"x\\""}}\n\n',
            r"no \"x\"",
        ),
        (event("", "abort"), "it stopped"),
    ],
)
def test_a_failure_of_the_other_engine_has_its_message(report: bytes, message: str) -> None:
    with pytest.raises(EngineFailedError) as failure:
        sent("one", "two").rest().feed(event("on") + report)
    assert str(failure.value) == message


@pytest.mark.parametrize("later", ["", "usage"])
def test_an_end_that_was_sent_is_not_sent_again(later: str) -> None:
    found = sent("one", "two")
    found.pieces.append(chunk(event("three", "stop")))
    if later:
        found.pieces.append(b'data: {"choices":[],"usage":{}}\n\n')
    assert found.has_ended
    rest = found.rest()
    usage = b'data: {"choices":[],"usage":{}}\n\n'
    assert rest.feed(event(None, role="assistant", content="") + event("onetwo")) == b""
    assert rest.feed(event("three")) == rest.feed(event("", "stop")) == b""
    assert rest.feed(usage) == usage
    again = found.rest()
    assert again.feed(event("onetwothree", "stop") + usage) == usage


def test_the_end_of_a_message_is_not_sent_again() -> None:
    stream = b"".join(message_steps([("content", "one")], 1, "w"))
    before, stop = stream[: (at := stream.index(b"event: message_stop"))], stream[at:]
    found = SentText(deque([before]), messages=True)
    assert found.has_ended
    assert found.rest().feed(stream) == stop


def test_no_text_may_follow_an_end_that_was_sent() -> None:
    found = sent("one")
    found.pieces.append(event("two", "length"))
    for other in (event("onetwo") + event("three"), event("onetwothree", "length")):
        with pytest.raises(TextDiffersError):
            found.rest().feed(other)


@pytest.mark.parametrize("delta", [{"reasoning": None}, {"reasoning": ""}, {"tool_calls": []}])
def test_empty_fields_are_no_other_output(delta: dict[str, Any]) -> None:
    found = sent('"tool_calls":[{', '"reasoning":"x"')
    found.pieces.append(event(None, **delta))
    found.condense(0)
    assert not found.other_output
    rest = found.rest()
    assert text_in(rest.feed(event('"tool_calls":[{"reasoning":"x" and more'))) == " and more"


def test_the_last_pieces_are_kept() -> None:
    found = sent(*"abcdef", condense_at=5)
    assert len(found.pieces) == MAX_LAST_PIECES
    assert text_in(found.rest().feed(event("abcdefg"))) == "g"


@pytest.mark.parametrize(
    ("space", "pieces", "new"),
    [
        ("", ["one"], "one"),
        ("\n\n", ["\n", "\n", "one"], "one"),
        ("\n\n", ["\n\none"], "one"),
        ("\n\n", ["\none", "\n"], "one\n"),
        ("\n\n", ["\n", "one"], "one"),
        (" ", ["one"], "one"),
        (" ", [" ", " one"], " one"),
    ],
)
def test_space_that_both_workers_generate_comes_once(
    space: str, pieces: list[str], new: str
) -> None:
    rest = sent("text", space).rest(space)
    assert rest.feed(event(None, role="assistant", content="")) == b""
    assert text_in(b"".join(rest.feed(event(piece)) for piece in pieces)) == new
    assert rest.is_caught_up


def test_an_end_in_place_of_the_space_passes() -> None:
    rest = sent("text\n").rest("\n")
    assert b'"stop"' in rest.feed(event("", "stop"))
    assert rest.is_caught_up


def test_reasoning_behind_the_text_means_that_it_began_anew() -> None:
    with pytest.raises(TextDiffersError):
        sent("text").rest("").feed(event(None, reasoning="hm"))


def test_content_is_kept_on_request() -> None:
    found = SentText(deque([event("one"), event("two"), event(" three")]), keeps_content=True)
    found.condense(1)
    assert found.content == "onetwo three"
    assert sent("one").content is None
    found.pieces.append(event(" four", reasoning=""))
    found.condense(0)
    assert found.content == "onetwo three four"
    found.pieces.append(event(None, reasoning="hm"))
    assert found.content is None


def test_content_beyond_the_bound_is_not_kept() -> None:
    found = SentText(deque([event("a" * (MAX_CONTENT + 1))]), keeps_content=True)
    found.condense(0)
    assert found.content is None

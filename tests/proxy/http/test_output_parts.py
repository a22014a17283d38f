"""Output with reasoning and tool calls, of which the client has a part."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.http.output_parts import OtherOutputError, OutputReader, unescape
from proxy.http.sent_text import RestOfText, SentText, TextDiffersError
from tests.proxy.http import agent_streams
from tests.proxy.http.agent_streams import Token, chat_event, chat_events, data, message_events
from tests.proxy.wire.scripts import chunk

LETTERS = st.sampled_from(
    [
        "a",
        "aa",
        '"',
        "\\",
        "\n",
        "ö",
        "😀",
        "data: ",
        "\n\n",
        "{}",
        "",
        '"content":"x"',
        '"arguments":"',
    ]
)
TEXT = st.lists(LETTERS, min_size=1, max_size=6)


@st.composite
def outputs(draw: st.DrawFn) -> list[Token]:
    """Return reasoning, text and calls, each of which may be absent."""
    tokens: list[Token] = []
    for kind in ("reasoning", "content"):
        if draw(st.booleans()):
            tokens += [(kind, text) for text in draw(TEXT)]
    for name in draw(st.lists(st.sampled_from(["get", "get_all", "ö"]), max_size=3)):
        tokens.append(("name", name))
        tokens += [("arguments", text) for text in draw(st.lists(LETTERS, max_size=6))]
    return tokens


@pytest.mark.parametrize("messages", [False, True], ids=["chat", "messages"])
@settings(max_examples=60)
@given(st.data())
def test_the_client_has_the_whole_output_once(messages: bool, data: st.DataObject) -> None:
    events_of: Callable[..., list[bytes]] = message_events if messages else chat_events
    read = agent_streams.read_message if messages else agent_streams.read_chat
    tokens = data.draw(outputs())
    first = events_of(tokens, run="first")
    # The client does not have the end, which is the last event of a chat with a choice.
    last = len(first) - (2 if messages else 3)
    cut = data.draw(st.integers(1, last))
    sent = SentText(deque(), messages=messages)
    for event in first[:cut]:
        sent.pieces.append(chunk(event))
        if data.draw(st.booleans()):
            sent.condense(data.draw(st.integers(0, 3)))
    assert sent.other_output == ""
    # The other worker has at least the tokens of which the client has text.
    known = 0
    while known < len(tokens) and len(events_of(tokens[:known])) - (len(first) - last) < cut:
        known += 1
    at_once = data.draw(st.integers(known, len(tokens)))
    stream = b"".join(events_of(tokens, at_once, run="second"))
    rest, passed = sent.rest(), b""
    while stream:
        size = data.draw(st.integers(1, 400))
        passed += rest.feed(stream[:size])
        stream = stream[size:]
    assert rest.is_caught_up
    output, got = read(b"".join(first[:cut]) + passed)
    assert output == agent_streams.whole(tokens)
    expected = read(b"".join(first))[1]
    first_ids = read_ids(first[:cut])
    assert got.pop("ids")[: len(first_ids)] == first_ids
    expected.pop("ids")
    assert got == expected


def read_ids(events: list[bytes]) -> list[str]:
    """Return the ids of calls and the signatures in events of which the last may be missing."""
    found = []
    for event in agent_streams.events_in(b"".join(events)):
        for choice in (event or {}).get("choices", ()):
            found += [c["id"] for c in choice["delta"].get("tool_calls", ()) if "id" in c]
        block, delta = (event or {}).get("content_block", {}), (event or {}).get("delta", {})
        found += [each[key] for each, key in ((block, "id"), (delta, "signature")) if key in each]
    return found


@pytest.mark.parametrize("messages", [False, True], ids=["chat", "messages"])
@settings(max_examples=40)
@given(st.data())
def test_batches_are_read_as_their_events(messages: bool, data: st.DataObject) -> None:
    tokens = data.draw(outputs())
    events = (message_events if messages else chat_events)(tokens)
    batch, one = OutputReader(messages=messages), OutputReader(messages=messages)
    in_batches: dict[str, str] = {}
    one_by_one: dict[str, str] = {}
    while events:
        count = data.draw(st.integers(1, 8))
        for channel, text in batch.texts(b"".join(map(chunk, events[:count]))).items():
            in_batches[channel] = in_batches.get(channel, "") + text
        events = events[count:]
    for event in agent_streams.events_in(
        b"".join((message_events if messages else chat_events)(tokens))
    ):
        for part in one.parts(event or {}):
            one_by_one[part.channel] = one_by_one.get(part.channel, "") + part.text
    assert {channel: text for channel, text in in_batches.items() if text} == one_by_one


@pytest.mark.parametrize("word", ["content", "text", "reasoning", "arguments", "name", "index"])
def test_a_token_may_be_the_name_of_a_member(word: str) -> None:
    chat = chat_events([("content", "a"), ("content", word)])
    assert OutputReader(messages=False).texts(b"".join(chat)) == {"content": f"a{word}"}
    completion = [data({"choices": [{"text": text}]}) for text in ("a", word)]
    assert OutputReader(messages=False).texts(b"".join(completion)) == {"content": f"a{word}"}


CALL: list[Token] = [
    ("content", "Hm."), ("name", "get"), ("arguments", '{"a": 1'), ("arguments", "}"),
]  # fmt: skip


def rest_of(tokens: list[Token], messages: bool) -> RestOfText:
    events = (message_events if messages else chat_events)(tokens)
    return SentText(deque(events[:-3]), messages=messages).rest()


@pytest.mark.parametrize("messages", [False, True], ids=["chat", "messages"])
@pytest.mark.parametrize(
    "other",
    [
        [("content", "Hn."), *CALL[1:]],
        [CALL[0], ("name", "got"), *CALL[2:]],
        [CALL[0], ("name", "get_all"), *CALL[2:]],
        [*CALL[:2], ("arguments", '{"b": 1'), CALL[3]],
        [("reasoning", "Hm."), *CALL[1:]],
        [CALL[0], CALL[0]],
        CALL[:3],
        CALL[1:],
    ],
    ids=str,
)
def test_another_output_is_an_error(messages: bool, other: list[Token]) -> None:
    events = (message_events if messages else chat_events)(other, len(other))
    with pytest.raises(TextDiffersError):
        rest_of(CALL, messages).feed(b"".join(events))


def test_text_that_a_parser_returns_later_is_waited_for() -> None:
    """Some parsers hold back the text between two calls while they read one large piece."""
    rest = SentText(deque(map(chat_event, ({"content": "a\n"}, {"content": "b"})))).rest()
    assert rest.feed(chat_event({"content": "a\n", "reasoning": "new"})) == b""
    passed = rest.feed(chat_event({"content": "b", "reasoning": "er"}) + b"data: [DONE]\n\n")
    assert agent_streams.read_chat(passed)[0] == [["reasoning", "newer"]]
    assert passed.endswith(b"data: [DONE]\n\n")


def test_what_is_held_back_is_bounded() -> None:
    rest = SentText(deque([chat_event({"content": "a" * 100})])).rest()
    new = chat_event({"reasoning": "b" * 10_000})
    for _ in range(6):
        assert rest.feed(new) == b""
    with pytest.raises(TextDiffersError):
        rest.feed(new)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (chat_event({"audio": {"data": "x"}, "tool_calls": []}), "audio"),
        (chat_event({"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}), "tool_calls"),
        (chat_event({"tool_calls": [{"id": "x", "function": {"name": "x"}}]}), "tool_calls"),
        (chat_event({"tool_calls": ["x"]}), "data"),
        (data({"choices": [{"text": 5, "delta": {"tool_calls": []}}]}), "data"),
        (chat_event({"reasoning": "\\"}).replace(b'\\\\', b"\\ud800"), "text"),
        (b'data: {"tool_calls": \n\n', "data"),
        (data({"choices": [{"text": "a", "logprobs": {"tokens": []}}]}), "logprobs"),
        (data({"choices": [{"text": "a", "token_ids": [1]}]}), "token_ids"),
    ],
)  # fmt: skip
def test_output_that_is_not_compared_is_named(event: bytes, why: str) -> None:
    sent = SentText(deque([chat_event({"content": "a"}), event]))
    assert sent.other_output == why
    sent.condense(0)
    assert sent.other_output == why


@pytest.mark.parametrize(
    "event",
    [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": 5}},
    ],
)
def test_other_blocks_of_a_message_are_named(event: dict[str, Any]) -> None:
    with pytest.raises(OtherOutputError):
        OutputReader(messages=True).texts(data(event))


def test_the_texts_are_those_of_the_json() -> None:
    text = 'ö"\\\n😀'
    assert unescape([json.dumps(text)[1:-1].encode()]) == text

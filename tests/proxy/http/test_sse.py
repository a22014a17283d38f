"""Event streams: only whole events pass, tokens are counted, errors are visible."""

from __future__ import annotations

import json

import pytest

from proxy.core.model.types import Usage
from proxy.http.sse import (
    MAX_HELD,
    TAIL,
    EventStream,
    carries_token,
    remove_usage,
    replace_cached_tokens,
    usage_in,
)

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_only_whole_events_pass_and_none_is_lost(size: int) -> None:
    stream, whole, out, tokens = EventStream(), ROLE + 5 * TOKEN + USAGE + DONE, b"", 0
    for at in range(0, len(whole), size):
        passed = stream.feed(whole[at : at + size])
        assert passed.endswith(b"\n\n") or not passed
        out += passed
        tokens += stream.tokens
    assert out + stream.rest() == whole
    assert tokens == 5
    assert stream.usage() == Usage(7, 3, 4)


def named(*names: str) -> bytes:
    """Return typed events whose text mentions event types."""
    data = b'{"delta":"event: message_delta"}'
    return b"".join(b"event: %b\ndata: %b\n\n" % (name.encode(), data) for name in names)


RESPONSES = (
    named("response.created", "response.output_item.added"),
    5 * [named("response.output_text.delta")],
    [
        named(f"response.{each}")
        for each in ("output_text.done", "content_part.done", "output_item.done", "completed")
    ],
)
MESSAGES = (
    named("message_start", "content_block_start"),
    5 * [named("content_block_delta")],
    [named("content_block_stop"), named("message_delta", "message_stop")],
)
CHAT = (ROLE, 5 * [TOKEN], [USAGE.replace(b":[]", b": []"), DONE])
KEEP_ALIVE = b": keep-alive\n\n"
WITH_KEEP_ALIVES = (
    KEEP_ALIVE + ROLE + KEEP_ALIVE,
    [TOKEN, KEEP_ALIVE, KEEP_ALIVE, *4 * [TOKEN]],
    [KEEP_ALIVE, USAGE, DONE],
)
ERROR = b'data: {"error": {"message": "no KV", "type": "InternalServerError", "code": 500}}\n\n'
FAILED = (ROLE, 5 * [TOKEN], [ERROR, DONE])


def delta(kind: str, **fields: str) -> bytes:
    data = {"type": "content_block_delta", "index": 0, "delta": {"type": kind, **fields}}
    return b"event: content_block_delta\ndata: %b\n\n" % compact(data)


def compact(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


# Text that mentions event types is text.
TALK = 'e_delta "type":"signature_delta" "type":"content-delta" "type":"message-end"'
THOUGHT = (
    named("message_start", "content_block_start"),
    4 * [delta("thinking_delta", thinking=TALK)]
    + [delta("signature_delta", signature="5e")]
    + [named("content_block_stop", "content_block_start")]
    + [delta("text_delta", text=TALK)],
    [named("content_block_stop"), named("message_delta", "message_stop")],
)


def numbered(kind: str, number: int, text: str = "a") -> bytes:
    data = b'{"type":"response.%b","sequence_number":%d,"delta":"%b"}'
    body = data % (kind.encode(), number, text.encode())
    return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), body)


def cohere(kind: str, delta: object = None) -> bytes:
    """Return an event of Cohere's API, without a name, as vLLM writes it."""
    return b"data: %b\n\n" % compact({"index": 0, "delta": {"message": delta}, "type": kind})


COHERE = (
    cohere("message-start", {"role": "assistant"}) + cohere("content-start"),
    2 * [cohere("content-delta", {"content": {"text": TALK}})]
    + [cohere("content-end"), cohere("citation-start"), cohere("citation-end")]
    + [cohere("tool-plan-delta", {"tool_plan": "a"}), cohere("tool-call-start")]
    + [cohere("tool-call-delta", {"tool_calls": {"function": {"arguments": "{"}}})],
    [cohere("tool-call-end"), cohere("message-end"), DONE],
)
COHERE_FAILED = (
    COHERE[0],
    5 * [cohere("content-delta")],
    [b'data: {"type": "message-end", "delta": {"error": "no KV"}}\n\n', DONE],
)


@pytest.mark.parametrize(
    "parts", [RESPONSES, MESSAGES, THOUGHT, CHAT, WITH_KEEP_ALIVES, FAILED, COHERE, COHERE_FAILED]
)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("framed", [False, True])
def test_opening_and_end_events_are_no_tokens(
    parts: tuple[bytes, list[bytes], list[bytes]], *, together: bool, framed: bool
) -> None:
    opening, tokens, ends = parts
    stream = EventStream()
    stream.feed(opening)
    seen = stream.tokens
    pieces = [b"".join([*tokens, *ends])] if together else [*tokens, *ends]
    stream.feed(pieces[0])
    seen += stream.tokens
    for piece in pieces[1:]:
        if framed:
            chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
            seen += stream.count(chunk)
        else:
            stream.feed(piece)
            seen += stream.tokens
    assert seen == 5


@pytest.mark.parametrize("before", [b"", TOKEN, ROLE + TOKEN])
@pytest.mark.parametrize("after", [b"", DONE, b": bye\n\n" + DONE])
@pytest.mark.parametrize("crlf", [False, True])
def test_usage_only_event_is_removed(before: bytes, after: bytes, crlf: bool) -> None:
    for event in (USAGE, USAGE.replace(b'"choices":[]', b'"choices" : [ ]')):
        events, expected = before + event + after, before + after
        if crlf:
            events, expected = (text.replace(b"\n", b"\r\n") for text in (events, expected))
        assert remove_usage(events) == expected


def test_usage_in_a_token_event_is_kept() -> None:
    both = TOKEN.replace(b"]}\n", b'],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n')
    assert b"usage" in both
    assert remove_usage(TOKEN + both + DONE) == TOKEN + both + DONE
    quoted = TOKEN.replace(b'"a"', rb'"{\"choices\":[],\"usage\":{\"prompt_tokens\":7}}"')
    assert remove_usage(quoted + DONE) == quoted + DONE
    assert remove_usage(quoted + both + USAGE + DONE) == quoted + both + DONE


@pytest.mark.parametrize("opening", [ROLE, COHERE[0], RESPONSES[0], b": ping\n\n", b""])
@pytest.mark.parametrize("together", [False, True])
def test_immediately_failing_stream_has_no_token(opening: bytes, *, together: bool) -> None:
    stream, pieces = EventStream(), (opening, ERROR, DONE)
    for piece in (b"".join(pieces),) if together else pieces:
        stream.feed(piece)
        assert stream.tokens == 0
    assert not stream.can_bypass_feed


def test_crlf_events_are_parsed() -> None:
    stream = EventStream()
    event = TOKEN.replace(b"\n", b"\r\n")
    assert stream.feed(event + event[:9]) == event
    assert stream.tokens == 1
    assert stream.feed(event[9:-1]) == b""
    assert stream.feed(b"\n") == event


def test_too_long_event_passes_in_part_and_is_torn() -> None:
    stream = EventStream()
    assert stream.feed(b"data: " + b"x" * (MAX_HELD - 6)) == b""
    assert not stream.torn
    assert len(stream.feed(b"xy")) == MAX_HELD + 2
    assert stream.torn
    assert stream.feed(b"z") == b"z"


@pytest.mark.parametrize(
    ("event", "carries"),
    [
        (TOKEN, True),
        (ROLE, False),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}', False),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":"hi"}}]}', True),
        (
            b'data: {"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[{}]}}]}',
            True,
        ),
        (b'data: {"choices":[{"text":"a"}]}', True),
        (b": ping", False),
        (b'data: {"error":{"message":"no KV"}}', False),
    ],
)
def test_carries_token(event: bytes, carries: bool) -> None:
    assert carries_token(event) is carries


def test_error_event_has_the_format_of_the_stream() -> None:
    stream = EventStream()
    stream.feed(TOKEN)
    plain = stream.error_event("gone", "worker_reset")
    assert plain.startswith(b"data: ")
    assert plain.endswith(b"\n\n")
    error = {"message": "gone", "type": "server_error", "param": None, "code": "worker_reset"}
    assert json.loads(plain[6:]) == {"error": error}
    stream = EventStream()
    stream.feed(b"event: message_start\ndata: {}\n\n")
    name, data = stream.error_event("gone", "worker_reset").split(b"\n", 1)
    assert name == b"event: error"
    kind = {"type": "api_error", "message": "gone"}
    assert json.loads(data[6:]) == {"type": "error", "error": kind}
    stream = EventStream()
    stream.feed(COHERE[0])
    end, done = stream.error_event("gone", "worker_reset").split(b"\n\n", 1)
    expected = {"error": "gone", "finish_reason": "ERROR"}
    assert (json.loads(end[6:]), done) == ({"type": "message-end", "delta": expected}, DONE)


@pytest.mark.parametrize(
    ("events", "number"),
    [
        ([numbered("created", 0)], 1),
        ([numbered("created", 0) + numbered("output_text.delta", 1)], 2),
        ([numbered("output_text.delta", at) for at in range(9)], 9),
        ([numbered("created", 0), b"event: error\ndata: {}\n\n"], 1),
        ([numbered("created", 3, '\\"sequence_number\\":8')], 4),
        ([b"event: response.created\ndata: {}\n\n"], 0),
    ],
)
def test_error_event_of_responses_has_the_next_sequence_number(
    events: list[bytes], number: int
) -> None:
    stream = EventStream()
    for event in events:
        stream.feed(event)
    name, data = stream.error_event("gone", "worker_reset").split(b"\n", 1)
    error = json.loads(data[6:])
    nested = error.pop("error")
    assert (name, nested["message"]) == (b"event: error", "gone")
    assert error == {
        "type": "error", "code": "worker_reset", "message": "gone", "param": None,
        "sequence_number": number,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (
            b'{"a":1,"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}',
            Usage(7, 2),
        ),
        (b'{"usage": {"prompt_tokens": 7, "total_tokens": 7}}', Usage(7)),
        (
            b'{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":5},'
            b'"output_tokens":2},"user":null}',
            Usage(7, 2, 5),
        ),
        (b'{"usage":null}', None),
        (b"{}", None),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}', None),
        (b'{"usage":{"prompt_tokens":7}}' + b" " * TAIL, None),
        (b" " * TAIL + b'{"usage":{"prompt_tokens":7}}', Usage(7)),
    ],
)
def test_usage_is_read_from_the_end_of_a_body(text: bytes, usage: Usage | None) -> None:
    assert usage_in(text) == usage


def test_last_usage_counts() -> None:
    stream = EventStream()
    for written in (1, 2, 3):
        stream.feed(b'data: {"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n' % written)
    stream.feed(DONE)
    assert stream.usage() == Usage(7, 3)


OPENAI_USAGE = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":1024}}}'
RESPONSES_USAGE = (
    b'{"response":{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":1024,'
    b'"cached_tokens_per_turn":[]},"output_tokens":4}}}'
)
COHERE_USAGE = (
    b'{"id":"c","usage":{"billed_units":{"input_tokens":1600.0,"output_tokens":9.0},'
    b'"tokens":{"input_tokens":1600.0,"output_tokens":9.0},"cached_tokens":1536.0},"x":1.0}'
)
ANTHROPIC_USAGE = (
    b'{"usage":{"input_tokens":64,"output_tokens":9,"cache_creation_input_tokens":null,'
    b'"cache_read_input_tokens":1536}}'
)


@pytest.mark.parametrize("cached", [0, 128, 1600])
def test_cached_tokens_are_replaced_in_the_format_of_each_api(cached: int) -> None:
    for text in (OPENAI_USAGE, RESPONSES_USAGE):
        assert replace_cached_tokens(text, cached) == text.replace(b"1024", b"%d" % cached)
    expected = json.loads(COHERE_USAGE)
    expected["usage"]["cached_tokens"] = cached
    assert json.loads(replace_cached_tokens(COHERE_USAGE, cached)) == expected
    expected = json.loads(ANTHROPIC_USAGE)
    expected["usage"] |= {"input_tokens": 1600 - cached, "cache_read_input_tokens": cached}
    assert json.loads(replace_cached_tokens(ANTHROPIC_USAGE, cached)) == expected


def test_cached_tokens_count_as_prompt() -> None:
    """Anthropic's API reports them separately."""
    assert usage_in(COHERE_USAGE) == Usage(1600, 9, 1536)
    assert usage_in(ANTHROPIC_USAGE) == Usage(1600, 9, 1536)
    assert usage_in(ANTHROPIC_USAGE.replace(b"null", b"32")) == Usage(1632, 9, 1536)
    assert usage_in(b'{"usage":{"input_tokens":64,"output_tokens":9}}') == Usage(64, 9)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"choices":[{"text":"\\"usage\\":{\\"cached_tokens\\": 7}"}]}',
        b'{"cached_tokens": 7}',
        b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}',
    ],
)
def test_recounted_keeps_text_without_usage(text: bytes) -> None:
    assert replace_cached_tokens(text, 3) == text

"""Workers that fail after the response has begun."""

from __future__ import annotations

import json

import pytest

from proxy.http.sse import MAX_HELD
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Script
from tests.proxy.wire.raw_client import BrokenError, Client, chat, get, request
from tests.proxy.wire.site import Fake, Site

SSE_HEAD = scripts.STREAM_HEAD
FIRST = [scripts.token("a"), scripts.token("b")]
CHUNKS = b"".join(map(scripts.chunk, FIRST))
HALF = scripts.token("never seen")[:-7]
# Text of a client is quoted, so it is not an event.
QUOTED_DONE = scripts.token("x\ndata: [DONE]\n\n")
FAILURES: dict[str, Script] = {
    "close": scripts.raw(SSE_HEAD + CHUNKS, end="close"),
    "reset": scripts.raw(SSE_HEAD + CHUNKS, end="reset"),
    "stall": scripts.raw(SSE_HEAD + CHUNKS, end="stall"),
    "a bad chunk": scripts.raw(SSE_HEAD + CHUNKS, b"zz\r\n\r\n", gap_s=0.03, end="stall"),
    "half an event": scripts.raw(SSE_HEAD + CHUNKS + scripts.chunk(HALF), end="close"),
    "half an event, reset": scripts.raw(SSE_HEAD + CHUNKS, scripts.chunk(HALF), end="reset"),
    "half a chunk": scripts.raw(SSE_HEAD + CHUNKS + b"40\r\n" + HALF[:20], end="close"),
    "half an event, stalled": scripts.raw(SSE_HEAD + CHUNKS + scripts.chunk(HALF), end="stall"),
}


async def read_events(client: Client) -> list[bytes]:
    """Return the events of a stream that ends properly as HTTP."""
    answer = await client.answer()
    assert answer.status == 200
    assert answer.body.endswith(b"\n\n")
    return answer.body.split(b"\n\n")[:-1]


@pytest.mark.parametrize("name", FAILURES)
async def test_broken_stream_ends_with_an_error_event(start: Start, name: str) -> None:
    site = await start(Fake("w0"), Fake("w1"), wire={"idle_s": 0.3})
    site.always(FAILURES[name])
    client = await site.send(chat(stream=True))
    *tokens, last = await read_events(client)
    assert tokens == [event.removesuffix(b"\n\n") for event in FIRST]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["message"]
    assert error["type"] == "server_error"
    assert {"param", "code"} <= set(error)
    assert len(site.served()) == 1
    site.always(scripts.obey("well"))
    assert (await client.ask(chat())).status == 200  # the client's connection is kept


async def test_connection_close_is_honoured_after_an_error_event(site: Site) -> None:
    site.fake.then(FAILURES["reset"])
    client = await site.send(chat("hi", b"Connection: close", stream=True))
    answer = await client.answer()
    assert answer.one(b"connection") == b"close"
    assert b'"error"' in answer.body
    assert await client.closed() == b""


def typed(name: str, **data: object) -> bytes:
    """Return an event with a name, as in /v1/responses and /v1/messages."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


DELTA = typed("response.output_text.delta", delta="a")
TEXT = typed("content_block_delta", delta={"type": "text_delta", "text": "a"})
COHERE_START = b'data: {"delta":{},"type":"message-start"}\n\n'
COHERE_TEXT = b'data: {"index":0,"delta":{},"type":"content-delta"}\n\n'
COHERE_END = b'data: {"type":"message-end","delta":{"finish_reason":"COMPLETE"}}\n\n'
# Path, first events of a stream, last event.
LAST_EVENTS = [
    ("/v1/chat/completions", b"".join(FIRST), scripts.DONE),
    ("/v1/completions", b"".join(FIRST), b"data:[DONE]\n\n"),
    ("/inference/v1/generate", b"".join(FIRST).replace(b"\n", b"\r\n"), b"data: [DONE]\r\n\r\n"),
    ("/v1/responses", DELTA, typed("response.completed", response={})),
    ("/v1/responses", DELTA, typed("response.incomplete", response={})),
    ("/v1/responses", DELTA, typed("response.failed", response={})),
    ("/v1/messages", TEXT, typed("message_stop")),
    ("/cohere/v2/chat", COHERE_START + COHERE_TEXT, COHERE_END),
    ("/cohere/v2/chat", COHERE_START + COHERE_TEXT, COHERE_END + scripts.DONE),
]
ANY_BODY = (
    b'{"model": "tiny", "prompt": "hi", "input": "hi", "messages": [], "token_ids": [1], '
    b'"max_tokens": 9, "stream": true}'
)


@pytest.mark.parametrize("end", ["reset", "stall"])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("path", "begin", "last"), LAST_EVENTS, ids=[f"{n}{x[0]}" for n, x in enumerate(LAST_EVENTS)]
)
async def test_stream_with_its_last_event_is_whole_for_any_end_of_connection(
    start: Start, path: str, begin: bytes, last: bytes, apart: bool, end: str
) -> None:
    site = await start(Fake("w0"), wire={"idle_s": 0.3})
    pieces = [SSE_HEAD + scripts.chunk(begin), scripts.chunk(last)]
    site.fake.then(scripts.raw(*pieces if apart else [b"".join(pieces)], gap_s=0.03, end=end))
    client = await site.client()
    answer = await client.ask(request(ANY_BODY, path=path))
    assert answer.body == begin + last
    assert (await client.ask(chat())).status == 200
    assert site.worker().breaker.has_no_failures


@pytest.mark.parametrize("last", [b"data: [DONE", QUOTED_DONE], ids=["half", "quoted"])
async def test_partial_or_quoted_done_is_not_the_last_event(site: Site, last: bytes) -> None:
    site.fake.then(scripts.raw(SSE_HEAD + CHUNKS + scripts.chunk(last), end="reset"))
    assert b'"worker_reset"' in (await site.ask(chat(stream=True))).body


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_partial_large_last_event_is_a_broken_stream(site: Site, end: str) -> None:
    partial = typed("response.completed", response="x" * (MAX_HELD + 1000))[:-100]
    site.fake.then(
        scripts.raw(SSE_HEAD + scripts.chunk(DELTA), scripts.chunk(partial), gap_s=0.03, end=end)
    )
    client = await site.send(request(ANY_BODY, path="/v1/responses"))
    with pytest.raises((BrokenError, ConnectionError)):
        await client.answer()
    await site.settled()
    assert not site.worker().breaker.has_no_failures


UNFRAMED = scripts.head(200, (b"content-type", scripts.SSE))


@pytest.mark.parametrize("last", [FIRST[1], HALF, QUOTED_DONE], ids=["event", "half", "quoted"])
@pytest.mark.parametrize("old", [False, True], ids=["1.1", "1.0"])
async def test_unframed_stream_without_done_ends_with_an_error_event(
    start: Start, last: bytes, old: bool
) -> None:
    """Only the end of the connection ends it, as when the worker dies."""
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.raw(UNFRAMED + FIRST[0], last, gap_s=0.02, end="close"))
    data = chat(stream=True)
    client = await site.send(data.replace(b"HTTP/1.1", b"HTTP/1.0") if old else data)
    head = await client.head()
    body = await client.body(head)
    whole = b"" if last is HALF else last
    assert body.startswith(FIRST[0] + whole + b'data: {"error"')
    assert b'"worker_reset"' in body
    assert b"[DONE]" not in body[len(FIRST[0] + whole) :]
    if old:
        assert await client.closed() == b""
    [call] = site.served()
    assert not site.worker(call.connection.worker.name).breaker.has_no_failures


@pytest.mark.parametrize(
    "done",
    [
        (scripts.DONE,),
        (scripts.DONE + b"\n",),
        (scripts.DONE + b": bye\n\n",),
        (b"data:[DO", b"NE]\n\n"),
        (b"data: [D", b"ONE]\r\n\r\n"),
        (b"data: [D", b"ONE]\n"),
        (b"data: [D", b"ONE]"),
    ],
    ids=b"".join,
)
async def test_unframed_stream_with_done_is_whole(site: Site, done: tuple[bytes, ...]) -> None:
    site.fake.then(scripts.raw(UNFRAMED + FIRST[0], *done, gap_s=0.02, end="close"))
    client = await site.client()
    assert (await client.ask(chat(stream=True))).body == FIRST[0] + b"".join(done)
    assert (await client.ask(chat())).status == 200
    assert site.worker().breaker.has_no_failures


@pytest.mark.parametrize("data", [b"", HALF])
async def test_unframed_stream_without_events_is_retried(start: Start, data: bytes) -> None:
    site = await start(Fake("w0"), Fake("w1"), router={"policy": "round_robin"})
    site.fakes["w0"].always(scripts.raw(UNFRAMED + data, end="close"))
    assert (await site.ask(chat(stream=True))).body.endswith(scripts.DONE)
    assert [len(fake.served) for fake in site.fakes.values()] == [1, 1]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("number", [3, 4, 5, 6])
async def test_unframed_typed_stream_without_its_last_event_gets_an_error_event(
    start: Start, number: int, whole: bool
) -> None:
    """These APIs have no `[DONE]`."""
    path, begin, last = LAST_EVENTS[number]
    site = await start(Fake("w0"), wire={"continuation": False})
    site.fake.then(scripts.raw(UNFRAMED + begin, last * whole, gap_s=0.02, end="close"))
    body = (await site.ask(request(ANY_BODY, path=path))).body
    assert body.startswith(begin + last * whole)
    rest = body.removeprefix(begin + last * whole)
    assert rest.startswith(b"event: error\ndata: {") == (not whole)
    assert site.worker().breaker.has_no_failures == whole


@pytest.mark.parametrize("number", [3, 6])
async def test_unframed_typed_stream_with_an_error_event_passes_unchanged(
    site: Site, number: int
) -> None:
    path, begin, _ = LAST_EVENTS[number]
    events = begin + typed("error", error={"message": "no KV"})
    site.fake.then(scripts.raw(UNFRAMED + events, end="close"))
    assert (await site.ask(request(ANY_BODY, path=path))).body == events


# What comes after the text of a response, before `response.completed`.
RESPONSE_ENDS = [
    typed(f"response.{each}", sequence_number=number)
    for number, each in enumerate(("output_text.done", "content_part.done", "output_item.done"), 5)
]


@pytest.mark.parametrize("end", ["close", "reset", "stall"])
@pytest.mark.parametrize("head", [SSE_HEAD, b""], ids=["chunked", "unframed"])
async def test_response_that_lacks_its_last_event_ends_with_an_error_event(
    start: Start, end: str, head: bytes
) -> None:
    """`response.completed` repeats the whole response, so the router cannot add it."""
    site = await start(Fake("w0"), Fake("w1"), wire={"idle_s": 0.3})
    events = b"".join((DELTA, *RESPONSE_ENDS))
    site.always(scripts.raw(head + scripts.chunk(events) if head else UNFRAMED + events, end=end))
    client = await site.send(request(ANY_BODY, path="/v1/responses"))
    body = (await client.answer()).body
    assert body.startswith(events + b"event: error\ndata: ")
    error = json.loads(body.removeprefix(events + b"event: error\ndata: "))
    assert (error["type"], error["sequence_number"], error["param"]) == ("error", 8, None)
    assert error["code"] == ("worker_timeout" if end == "stall" else "worker_reset")
    assert error["message"] == "The worker failed during the response."
    assert len(site.served()) == 1
    site.always(scripts.answer())
    assert (await client.ask(chat())).status == 200  # the client's connection is kept


ENGINE_DEAD = scripts.event({"error": {"message": "EngineDeadError", "code": 500}}) + scripts.DONE


@pytest.mark.parametrize("end", [b"", ENGINE_DEAD], ids=["no [DONE]", "an engine's error"])
async def test_framed_stream_passes_unchanged(site: Site, end: bytes) -> None:
    tail = scripts.chunk(end) if end else b""
    site.fake.then(scripts.raw(SSE_HEAD + CHUNKS + tail + scripts.LAST_CHUNK))
    assert (await site.ask(chat(stream=True))).body == b"".join(FIRST) + end


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_pipelined_requests_are_served_after_a_broken_stream(site: Site, end: str) -> None:
    site.fake.then(FAILURES[end])
    client = await site.send(chat(stream=True) + chat() + get("/health") + chat(stream=True))
    *_, last = await read_events(client)
    assert b'"error"' in last
    assert (await client.answer()).json()["choices"]
    assert (await client.answer()).status == 200
    assert (await client.answer()).body.endswith(scripts.DONE)
    assert len(site.fake.served) == 3


async def test_pipelined_requests_are_dropped_after_a_broken_body(site: Site) -> None:
    """A client would read later bytes as part of the promised body."""
    head = scripts.head(200, (b"content-type", b"application/json"), (b"content-length", b"9"))
    site.fake.then(scripts.raw(head + b"{", end="reset"))
    client = await site.send(chat() + chat())
    await client.head()
    assert await client.closed() in (b"{", b"")
    assert len(site.fake.served) == 1


def finished(reason: str = "stop", index: int = 0) -> bytes:
    choice = {"index": index, "delta": {}, "finish_reason": reason}
    return scripts.event({"id": "c", "choices": [choice]})


TOKENS, USAGE = b"".join(FIRST), scripts.usage_event(3, 2)
WITH_USAGE = {"stream_options": {"include_usage": True}}
MESSAGE_END = typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1})
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEXT_END = scripts.event({"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]})
# Path, fields of the request, events before the failure, the event that the router adds.
COMPLETE = {
    "chat": (CHAT, {}, TOKENS + finished(), scripts.DONE),
    "chat, usage": (CHAT, WITH_USAGE, TOKENS + finished() + USAGE, scripts.DONE),
    "chat, half": (CHAT, {}, TOKENS + finished() + b"data: [DO", scripts.DONE),
    "completion": (COMPLETION, {}, FIRST[0] + TEXT_END, scripts.DONE),
    "message": ("/v1/messages", {}, TEXT + MESSAGE_END, STOP),
}


@pytest.mark.parametrize("end", ["close", "reset", "stall"])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", COMPLETE)
async def test_stream_that_lacks_only_its_last_event_gets_it(
    start: Start, name: str, apart: bool, end: str
) -> None:
    path, fields, events, last = COMPLETE[name]
    site = await start(Fake("w0"), Fake("w1"), wire={"idle_s": 0.3})
    whole = events[: events.rindex(b"\n\n") + 2]
    pieces = [events]
    if apart:
        pieces = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
        pieces += [events[len(whole) :]] * (events != whole)
    site.always(scripts.raw(SSE_HEAD, *map(scripts.chunk, pieces), gap_s=0.02, end=end))
    client = await site.client()
    body = json.dumps(json.loads(ANY_BODY) | fields).encode()
    answer = await client.ask(request(body, path=path))
    assert answer.body == whole + last
    assert len(site.served()) == 1
    site.always(scripts.answer())
    assert (await client.ask(chat())).status == 200  # the client's connection is kept


# Fields of the request, and events of a stream that lacks more than its last event.
INCOMPLETE = {
    "usage": (WITH_USAGE, TOKENS + finished()),
    "another choice": ({"n": 2}, TOKENS + finished() + finished(index=1)),
    "an aborted answer": ({}, TOKENS + finished("abort")),
    "an error": ({}, TOKENS + finished() + scripts.event({"error": {"message": "no"}})),
    "quoted": ({}, TOKENS + scripts.token('"finish_reason":"stop"')),
}


@pytest.mark.parametrize("name", INCOMPLETE)
async def test_stream_that_lacks_more_ends_with_an_error_event(start: Start, name: str) -> None:
    fields, events = INCOMPLETE[name]
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.raw(SSE_HEAD + scripts.chunk(events), end="reset"))
    answer = await site.ask(chat(stream=True, **fields))
    assert answer.body.startswith(events + b'data: {"error"')


async def test_unframed_stream_that_lacks_only_done_gets_it(site: Site) -> None:
    site.fake.then(scripts.raw(UNFRAMED + FIRST[0], finished(), gap_s=0.02, end="close"))
    client = await site.client()
    answer = await client.ask(chat(stream=True))
    assert answer.body == FIRST[0] + finished() + scripts.DONE

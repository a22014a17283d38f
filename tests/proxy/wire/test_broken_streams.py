"""A worker that fails after its answer has begun: the client sees it, and no fake end.

Peers cut the stream off without a word, or invent a `finish_reason`.
"""

from __future__ import annotations

import json

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.client import Client, chat, request
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Script
from tests.proxy.wire.site import Fake, Site

SSE_HEAD = scripts.head(200, (b"content-type", scripts.SSE), (b"transfer-encoding", b"chunked"))
FIRST = [scripts.token("a"), scripts.token("b")]
CHUNKS = b"".join(map(scripts.chunk, FIRST))
HALF = scripts.token("never seen")[:-7]
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
    """Read a stream that ends well as HTTP; the error event is its last."""
    answer = await client.answer()
    assert answer.status == 200
    assert answer.body.endswith(b"\n\n")
    return answer.body.split(b"\n\n")[:-1]


@pytest.mark.parametrize("name", FAILURES)
async def test_the_stream_ends_with_an_error_event(start: Start, name: str) -> None:
    site = await start(Fake("w0"), Fake("w1"), wire={"idle_s": 0.3})
    site.always(FAILURES[name])
    client = await site.client()
    await client.send(chat(stream=True))
    *tokens, last = await read_events(client)
    assert tokens == [event.removesuffix(b"\n\n") for event in FIRST]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["message"]
    assert error["type"] == "server_error"
    assert {"param", "code"} <= set(error)
    assert await client.closed() == b""
    assert len(site.served()) == 1
    await site.settled()


async def test_http_1_0_gets_the_event_too(site: Site) -> None:
    site.fake.then(FAILURES["reset"])
    client = await site.client()
    await client.send(chat(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
    await client.head()
    body = await client.closed()
    assert b'"error"' in body.split(b"\n\n")[-2]
    assert b"[DONE]" not in body


async def test_events_with_types_get_one_of_their_kind(site: Site) -> None:
    """As /v1/responses and /v1/messages stream."""
    typed = b'event: response.output_text.delta\ndata: {"type": "x", "delta": "a"}\n\n'
    site.fake.then(scripts.raw(SSE_HEAD + scripts.chunk(typed), end="reset"))
    body = b'{"model": "tiny", "input": "hi", "stream": true}'
    client = await site.client()
    await client.send(request(body, path="/v1/responses"))
    *_, last = await read_events(client)
    name, data = last.split(b"\n")
    assert name == b"event: error"
    parsed = json.loads(data.removeprefix(b"data: "))
    assert parsed["type"] == "error"
    assert parsed["error"]["message"]


@pytest.mark.parametrize("began", [False, True])
async def test_cohere_s_ends_as_such_streams_do(site: Site, began: bool) -> None:
    """Its events have no names: whoever reads them looks at their types."""
    said = b'data: {"delta":{},"type":"message-start"}\n\n'
    if began:
        said += b'data: {"index":0,"delta":{},"type":"content-delta"}\n\n'
    site.fake.then(scripts.raw(SSE_HEAD + scripts.chunk(said), end="reset"))
    body = b'{"model": "tiny", "messages": [], "stream": true}'
    client = await site.client()
    await client.send(request(body, path="/cohere/v2/chat"))
    *_, last, done = await read_events(client)
    end = json.loads(last.removeprefix(b"data: "))
    assert end["type"] == "message-end"
    assert end["delta"]["finish_reason"] == "ERROR"
    assert end["delta"]["error"]
    assert done == b"data: [DONE]"


async def test_a_stream_that_ended_well_gets_no_error(site: Site) -> None:
    """Some close the connection after [DONE] and the last chunk."""
    tail = scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK
    for end in ("keep", "close", "reset"):
        site.fake.then(scripts.raw(SSE_HEAD + CHUNKS + tail, end=end))
        answer = await site.ask(chat(stream=True))
        assert answer.body == b"".join(FIRST) + scripts.DONE


UNFRAMED = scripts.head(200, (b"content-type", scripts.SSE))
DONE_PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/v1/audio/transcriptions",
]
BODY = b'{"model": "tiny", "prompt": "hi", "messages": [], "token_ids": [1], "stream": true}'
# What a client writes is quoted, so it is no event of its own.
QUOTED = scripts.token("x\ndata: [DONE]\n\n")


def to(path: str) -> bytes:
    """Ask for a stream there."""
    if "audio" not in path:
        return request(BODY, path=path)
    part = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--x--\r\n'
    data = request(part, path=path)
    return data.replace(b"application/json", b"multipart/form-data; boundary=x")


@pytest.mark.parametrize("path", DONE_PATHS)
@pytest.mark.parametrize("last", [FIRST[1], HALF, QUOTED], ids=["event", "half", "quoted"])
@pytest.mark.parametrize("old", [False, True], ids=["1.1", "1.0"])
async def test_one_without_framing_that_stops_without_its_last_word_was_cut_off(
    start: Start, path: str, last: bytes, old: bool
) -> None:
    """Its end is that of the connection, as if its worker had died."""
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.raw(UNFRAMED + FIRST[0], last, gap_s=0.02, end="close"))
    client = await site.client()
    asked = to(path)
    await client.send(asked.replace(b"HTTP/1.1", b"HTTP/1.0") if old else asked)
    head = await client.head()
    body = await client.body(head)
    whole = b"" if last is HALF else last
    assert body.startswith(FIRST[0] + whole + b'data: {"error"')
    assert b'"worker_reset"' in body
    assert b"[DONE]" not in body[len(FIRST[0] + whole) :]
    assert await client.closed() == b""
    assert len(site.served()) == 1
    assert not any(worker.breaker.spotless for worker in site.fleet if worker.name == "w0")


@pytest.mark.parametrize("path", DONE_PATHS)
@pytest.mark.parametrize("end", [b"", b"\n", b": bye\n\n"])
async def test_one_without_framing_that_has_its_last_word_is_whole(
    site: Site, path: str, end: bytes
) -> None:
    site.fake.then(
        scripts.raw(UNFRAMED + FIRST[0], FIRST[1], scripts.DONE + end, gap_s=0.02, end="close")
    )
    client = await site.client()
    answer = await client.ask(to(path))
    assert answer.body == b"".join(FIRST) + scripts.DONE + end
    assert (await client.ask(chat())).status == 200
    assert site.worker().breaker.spotless


async def test_last_words_may_be_cut_from_what_stands_before_them(site: Site) -> None:
    """In CRLF, without a blank after the colon, and with no empty line at the end."""
    for said in (b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]\n", b"data: [DONE]"):
        site.fake.then(
            scripts.raw(UNFRAMED + FIRST[0], said[:8], said[8:], gap_s=0.02, end="close")
        )
        assert (await site.ask(chat(stream=True))).body == FIRST[0] + said


@pytest.mark.parametrize("said", [b"", HALF])
async def test_one_without_framing_that_says_nothing_is_asked_elsewhere(
    start: Start, said: bytes
) -> None:
    site = await start(Fake("w0"), Fake("w1"), router={"policy": "round_robin"})
    site.fakes["w0"].always(scripts.raw(UNFRAMED + said, end="close"))
    assert (await site.ask(chat(stream=True))).body.endswith(scripts.DONE)
    assert [len(fake.served) for fake in site.fakes.values()] == [1, 1]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_typed_streams_without_framing_end_as_they_do(site: Site, path: str) -> None:
    """They have no such word."""
    typed = b'event: response.output_text.delta\ndata: {"type": "x", "delta": "a"}\n\n'
    site.fake.then(scripts.raw(UNFRAMED + typed, end="close"))
    body = b'{"model": "tiny", "input": "hi", "messages": [], "max_tokens": 1, "stream": true}'
    assert (await site.ask(request(body, path=path))).body == typed


async def test_what_a_worker_calls_the_end_is_the_end(site: Site) -> None:
    """A whole body without [DONE] passes as it is: nothing is made up, either way."""
    site.fake.then(scripts.raw(SSE_HEAD + CHUNKS + scripts.LAST_CHUNK))
    assert (await site.ask(chat(stream=True))).body == b"".join(FIRST)


async def test_a_workers_own_error_event_passes(site: Site) -> None:
    event = scripts.event({"error": {"message": "EngineDeadError", "code": 500}})
    tail = scripts.chunk(event) + scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK
    site.fake.then(scripts.raw(SSE_HEAD + CHUNKS + tail))
    assert (await site.ask(chat(stream=True))).body == b"".join(FIRST) + event + scripts.DONE


async def test_requests_sent_ahead_on_that_connection_are_not_answered(site: Site) -> None:
    site.fake.then(FAILURES["reset"])
    client = await site.client()
    await client.send(chat(stream=True) + chat())
    await read_events(client)
    assert await client.closed() == b""
    assert len(site.fake.served) == 1


async def test_a_stream_of_a_stated_length_is_broken_off(site: Site) -> None:
    """No event fits into a body whose length is promised."""
    head = scripts.head(200, (b"content-type", scripts.SSE), (b"content-length", b"5000"))
    site.fake.then(scripts.raw(head + FIRST[0], end="reset"))
    client = await site.client()
    await client.send(chat(stream=True))
    head_read = await client.head()
    if head_read.all(b"content-length"):
        rest = await client.closed()
        assert len(rest) < 5000
        assert b"[DONE]" not in rest
    else:
        assert b'"error"' in await client.body(head_read)


async def test_it_counts_as_a_failure_of_the_worker(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), router={"policy": "round_robin"})
    site.fakes["w0"].always(FAILURES["reset"])
    for _ in range(12):
        await site.ask(chat(stream=True))
    assert len(site.fakes["w0"].served) == 3

"""Bodies pass unchanged from client to worker and back."""

from __future__ import annotations

import gzip

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import request
from tests.proxy.wire.site import Site

PLAIN = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
ODD = {
    "spacing": b' {\t"model" :"tiny",\r\n  "messages":[ {"role":"user","content":"hi"} ]  }\n\n',
    "floats": PLAIN[:-1] + b', "temperature": 0.7, "top_p": 0.70, "min_p": 1e-1, "x": 1.0}',
    "nulls": PLAIN[:-1] + b', "stop": null, "seed": null, "user": null}',
    "duplicate keys": PLAIN[:-1] + b', "seed": 1, "seed": 2, "model": "tiny"}',
    "escapes": PLAIN[:-1] + b', "user": "\\u00e9\\ud83d\\ude00\\/ \\u0041"}',
    "utf-8": PLAIN[:-1] + ', "user": "日本語 é 😀"}'.encode(),
    "large numbers": PLAIN[:-1] + b', "seed": 9007199254740993, "y": 1e308, "z": -0}',
    "unknown fields": PLAIN[:-1] + b', "vllm_xargs": {"a": [1, {"b": []}]}, "": {}}',
    "key order": b'{"z": 1, "messages": [], "a": 2, "model": "tiny"}',
    "HTTP inside": PLAIN[:-1]
    + b', "user": "\r\n\r\nGET /health HTTP/1.1\\r\\n"}'.replace(b"\r\n", b"\\r\\n"),
}


@pytest.mark.parametrize("chunks", [None, (7,), (1, 1, 1 << 20)], ids=["fixed", "sevens", "ones"])
@pytest.mark.parametrize("name", ODD)
async def test_request_body_passes_unchanged(
    site: Site, name: str, chunks: tuple[int, ...] | None
) -> None:
    answer = await site.ask(request(ODD[name], chunks=chunks))
    assert answer.status == 200
    [call] = site.fake.served
    assert call.body == ODD[name]


@pytest.mark.parametrize("chunks", [None, (65536,)], ids=["fixed", "chunked"])
@pytest.mark.parametrize(
    "size", [1 << 10, (32 << 10) + 1, (128 << 10) + 1, 220_000, 1 << 20, 10 << 20]
)
async def test_body_of_any_size_passes_unchanged(
    start: Start, size: int, chunks: tuple[int, ...] | None
) -> None:
    site = await start(wire={"max_body_bytes": 11 << 20})
    site.worker().max_model_len = None
    frame = b'{"model": "tiny", "prompt": "%s", "max_tokens": 1}'
    body = frame % (b"0123456789abcdef" * (size // 16 + 1))[: size - len(frame) + 2]
    assert len(body) == size
    answer = await site.ask(request(body, path="/v1/completions", chunks=chunks), within=10.0)
    assert answer.status == 200
    [call] = site.fake.served
    assert call.body == body


async def test_multipart_form_passes_unchanged(site: Site) -> None:
    sound = bytes(range(256)) * 400 + b"\r\n--not the boundary\r\n"
    body = (
        b'--xYz\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
        b'--xYz\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\n" + sound + b"\r\n--xYz--\r\n"
    )
    data = request(body, path="/v1/audio/transcriptions").replace(
        b"Content-Type: application/json", b"Content-Type: multipart/form-data; boundary=xYz"
    )
    assert (await site.ask(data)).status == 200
    [call] = site.fake.served
    assert call.body == body
    assert call.all(b"content-type") == [b"multipart/form-data; boundary=xYz"]


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize(
    "body",
    [b"", b'{ "a":0.7 ,"b":null }\n', bytes(range(256)) * 500, b"x" * (3 << 20)],
    ids=["empty", "odd", "binary", "3 MB"],
)
async def test_response_body_passes_unchanged(site: Site, framing: str, body: bytes) -> None:
    site.fake.then(scripts.answer(200, body, framing=framing))
    answer = await site.ask(request(PLAIN))
    assert (answer.status, answer.body) == (200, body)


async def test_gzip_response_stays_compressed(site: Site) -> None:
    compressed = gzip.compress(b'{"a": 1}')
    site.fake.then(scripts.answer(200, compressed, (b"content-encoding", b"gzip")))
    answer = await site.ask(request(PLAIN, b"Accept-Encoding: gzip"))
    assert answer.one(b"content-encoding") == b"gzip"
    assert answer.body == compressed
    assert site.fake.served[0].all(b"accept-encoding") == [b"gzip"]


STREAMS = {
    "usual": b'data: {"a":0.70}\n\ndata: {"b": null}\n\ndata: [DONE]\n\n',
    "crlf": b"data: {}\r\n\r\ndata: {}\r\n\r\ndata: [DONE]\r\n\r\n",
    "comments": b": keep-alive\n\n: keep-alive\n\ndata: {}\n\ndata: [DONE]\n\n",
    "typed": b"event: response.created\ndata: {}\n\nevent: x\nid: 7\ndata: a\ndata: b\n\n",
    "open end": b"data: {}\n\ndata: no blank line after it\n",
    "large event": b"data: " + b"y" * (2 << 20) + b"\n\ndata: [DONE]\n\n",
    "unicode": 'data: {"c": "日\\u65e5😀"}\n\ndata: [DONE]\n\n'.encode(),
}


@pytest.mark.parametrize("size", [1, 5, 1 << 16])
@pytest.mark.parametrize("name", STREAMS)
async def test_stream_passes_unchanged(site: Site, name: str, size: int) -> None:
    body = STREAMS[name]
    if size < 100 and len(body) > 10_000:
        size = 30_011
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    head = scripts.STREAM_HEAD
    site.fake.then(scripts.raw(head, *map(scripts.chunk, pieces), scripts.LAST_CHUNK))
    answer = await site.ask(request(PLAIN[:-1] + b', "stream": true}'))
    assert answer.body == body


async def test_wrong_types_inside_a_body_pass_to_the_worker(site: Site) -> None:
    for body in (
        b'{"model": "tiny", "messages": "no list", "max_tokens": 1}',
        b'{"model": "tiny", "messages": [null, 3, {"content": {"a": 1}}], "max_tokens": "many"}',
        b'{"model": "tiny", "messages": [], "n": -5, "max_tokens": -1, "stream": "maybe"}',
        b'{"model": "tiny", "messages": [], "tools": 7, "stop": {}, "max_tokens": 0.5}',
    ):
        site.fake.then(scripts.error(400, "as the worker words it"))
        answer = await site.ask(request(body))
        assert answer.status == 400
        assert answer.error()["message"] == "as the worker words it"
        assert site.fake.served[-1].body == body

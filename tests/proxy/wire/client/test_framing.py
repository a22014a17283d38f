"""Ambiguous framing is refused, from clients and from workers."""

from __future__ import annotations

import asyncio

import pytest

from proxy.http.response_parser import ResponseError
from tests.proxy.http.test_request import status
from tests.proxy.http.test_response_parser import parsed
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import DEADLINE_S, BrokenError, chat
from tests.proxy.wire.site import Site

POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: a\r\n"
BODY = b'{"model": "tiny", "messages": []}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + LENGTH + b"\r\n" + BODY

AMBIGUOUS = {
    "length and chunks": POST + HOST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and length": POST + HOST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two lengths": POST + HOST + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY,
    "the same length twice": POST + HOST + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": POST + HOST + b"Content-Length: 33, 33\r\n\r\n" + BODY,
    "a signed length": POST + HOST + b"Content-Length: +33\r\n\r\n" + BODY,
    "a negative length": POST + HOST + b"Content-Length: -1\r\n\r\n" + BODY,
    "a hexadecimal length": POST + HOST + b"Content-Length: 0x21\r\n\r\n" + BODY,
    "a length with a gap": POST + HOST + b"Content-Length: 3 3\r\n\r\n" + BODY,
    "an empty length": POST + HOST + b"Content-Length: \r\n\r\n" + BODY,
    "a length beyond 64 bits": POST + HOST + b"Content-Length: 18446744073709551649\r\n\r\n" + BODY,
    "two codings": POST + HOST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "gzip": POST + HOST + b"Transfer-Encoding: gzip\r\n\r\n" + CHUNKS,
    "gzip, chunked": POST + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "chunked, gzip": POST + HOST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKS,
    "chunked, identity": POST + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "identity": POST + HOST + b"Transfer-Encoding: identity\r\n\r\n" + CHUNKS,
    "xchunked": POST + HOST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
    "chunked and something": POST + HOST + b"Transfer-Encoding: chunked;x=y\r\n\r\n" + CHUNKS,
    "chunked in quotes": POST + HOST + b'Transfer-Encoding: "chunked"\r\n\r\n' + CHUNKS,
    "chunked behind a tab": POST + HOST + b"Transfer-Encoding:\x0bchunked\r\n\r\n" + CHUNKS,
    "chunked, folded": POST + HOST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "a folded header": POST + HOST + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded first header": POST + b" X: a\r\n" + HOST + LENGTH + b"\r\n" + BODY,
    "space before the colon": POST + HOST + b"Content-Length : 33\r\n\r\n" + BODY,
    "tab before the colon": POST + HOST + b"Transfer-Encoding\t: chunked\r\n\r\n" + CHUNKS,
    "no colon": POST + HOST + b"Content-Length 33\r\n\r\n" + BODY,
    "an empty name": POST + HOST + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL in a value": POST + HOST + b"X: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "a CR in a value": POST + HOST + b"X: a\rContent-Length: 0\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL in a name": POST + HOST + b"X\x00: a\r\n" + LENGTH + b"\r\n" + BODY,
    "no host": POST + LENGTH + b"\r\n" + BODY,
    "two hosts": POST + HOST + b"Host: b\r\n" + LENGTH + b"\r\n" + BODY,
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
    "HTTP/2.0": POST.replace(b"1.1", b"2.0") + HOST + LENGTH + b"\r\n" + BODY,
    "HTTP/1.2": POST.replace(b"1.1", b"1.2") + HOST + LENGTH + b"\r\n" + BODY,
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/1.10": POST.replace(b"1.1", b"1.10") + HOST + LENGTH + b"\r\n" + BODY,
    "a lower-case protocol": POST.replace(b"HTTP", b"http") + HOST + LENGTH + b"\r\n" + BODY,
    "a gap in the target": b"POST /v1/chat/completions x HTTP/1.1\r\n" + HOST + b"\r\n",
    "an odd method": b"P@ST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n",
    "a control byte in the target": b"GET /health\x01 HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT worker:80 HTTP/1.1\r\nHost: worker:80\r\n\r\n",
}
BAD_CHUNKS = {
    "no hex": b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "an empty size": b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "0x": b"0x21\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a sign": b"+21\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a negative size": b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a gap before the size": b" 21\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a gap after the size": b"21 \r\n" + BODY + b"\r\n0\r\n\r\n",
    "too short": b"10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "too large for 64 bits": b"10000000000000021\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no end of line after it": b"21\r\n" + BODY + b"0\r\n\r\n",
    "a bare LF after it": b"21\r\n" + BODY + b"\n0\r\n\r\n",
    "a bare LF after the size": b"21\n" + BODY + b"\r\n0\r\n\r\n",
    "a bare CR after the size": b"21\r" + BODY + b"\r\n0\r\n\r\n",
    "an extension with a CR": b"21;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_request_is_refused(name: str) -> None:
    expected = {"HTTP/2.0": 505, "CONNECT": 405}.get(name, 400)
    assert status(AMBIGUOUS[name] + SMUGGLED) == expected


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_bad_chunk_is_refused(name: str, more: bytes) -> None:
    assert status(POST + HOST + more + CHUNKED + b"\r\n" + BAD_CHUNKS[name] + SMUGGLED) == 400


@pytest.mark.parametrize(
    "data",
    [
        *(AMBIGUOUS[name] for name in ("length and chunks", "a folded header", "HTTP/0.9", "TLS")),
        POST + HOST + CHUNKED + b"\r\n" + BAD_CHUNKS["no hex"],
    ],
)
async def test_refused_framing_closes_the_connection(start: Start, data: bytes) -> None:
    site = await start(wire={"linger_s": 0.05})
    client = await site.send(data + SMUGGLED)
    answer = await client.answer()
    assert answer.status == 400
    answer.error()
    assert await client.closed() == b""  # nothing after it was taken for a request
    assert site.fake.calls == []


# Responses of workers

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: 2\r\n\r\n{}"
GARBAGE = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a bad length": HEAD + b"Content-Length: two\r\n\r\n{}",
    "a length of thousands of zeros": HEAD + b"Content-Length: %b2\r\n\r\n{}" % (b"0" * 5000),
    "a length in a 1xx": b"HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\n" + WHOLE,
    "chunks in a 1xx": b"HTTP/1.1 103 Early Hints\r\n" + CHUNKED + b"\r\n" + WHOLE,
    "gzip and chunked": HEAD + b"Transfer-Encoding: gzip\r\n" + CHUNKED + b"\r\n{}",
    "two codings": HEAD + CHUNKED + CHUNKED + b"\r\n{}",
    "HTTP/0.9": HEAD.replace(b"1.1", b"0.9") + b"Content-Length: 2\r\n\r\n{}",
    "HTTP/2.0": HEAD.replace(b"1.1", b"2.0") + b"Content-Length: 2\r\n\r\n{}",
    "gzip coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "gzip, chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a bad first chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a folded header": HEAD + b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "a NUL in a header": HEAD + b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "switching protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n"
    b"Connection: upgrade\r\n\r\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_malformed_response_raises(data: bytes) -> None:
    with pytest.raises(ResponseError):
        parsed(data)


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"Content-Length: 100\r\n\r\n", b'{"half": '),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b'9\r\n{"half": \r\n'),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b'20\r\n{"half": '),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b'9\r\n{"half": \r\n', b"zz\r\n{}\r\n"),
        (
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
            b'9\r\n{"half": \r\n',
            b"2\r\n{}XX0\r\n\r\n",
        ),
    ],
    ids=["length too long", "no last chunk", "half a chunk", "bad second chunk", "bad chunk end"],
)
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_truncated_response_body_breaks_the_client_connection(
    site: Site, pieces: tuple[bytes, ...], end: str
) -> None:
    site.fake.then(scripts.raw(*pieces, gap_s=0.03, end=end))
    client = await site.send(chat())
    with pytest.raises((BrokenError, ConnectionError)):
        await client.answer()
    assert (await site.ask(chat())).status == 200  # the next one is served


async def test_broken_response_to_http_1_0_client_is_reset(site: Site) -> None:
    """Its body ends with the connection, so only a reset shows the break."""
    pieces = HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b'9\r\n{"half": \r\n'
    site.fake.then(scripts.raw(*pieces, gap_s=0.03, end="close"))
    client = await site.send(chat().replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (await client.head()).status == 200
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(DEADLINE_S):
            await client.reader.read()

"""Valid requests and answers, and the pieces that make them invalid."""

from __future__ import annotations

CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'
SHORT = b'{"prompt": "x"}'
# A body that looks like a request: a parser that ends the request too early reads this one.
INNER = b"GET /v1/models HTTP/1.1\r\nHost: inner\r\n\r\n"


def _post(body: bytes, *lines: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    head = (b"POST %b HTTP/1.1" % path, b"Host: router:8000", *lines)
    return b"\r\n".join(head) + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _chunks(*pieces: bytes, last: bytes = b"0\r\n\r\n", lines: tuple[bytes, ...] = ()) -> bytes:
    head = (
        b"POST /v1/completions HTTP/1.1",
        b"Host: router",
        *lines,
        b"Transfer-Encoding: chunked",
    )
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"\r\n".join(head) + b"\r\n\r\n" + body + last


REQUESTS: tuple[bytes, ...] = (
    b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: router\r\nAccept: */*\r\nUser-Agent: curl/8.5.0\r\n\r\n",
    b"HEAD /ready HTTP/1.1\r\nhost:router\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: router\r\n\r\n",
    b"GET /v1/responses/resp_1?x=y&z=%20 HTTP/1.1\r\nHost: [::1]:8000\r\nX-Explain: 1\r\n\r\n",
    _post(CHAT, b"Content-Type: application/json", b"Authorization: Bearer sk-1"),
    _post(CHAT, b"X-Request-Id: a-1", b"Accept-Encoding: gzip, deflate", b"traceparent: 00-0-0-00"),
    _post(SHORT, b"Connection: keep-alive, X-Hop", b"X-Hop: 1", b"Keep-Alive: timeout=5"),
    _post(SHORT, b"Connection: close"),
    _post(CHAT, b"Expect: 100-continue"),
    _post(INNER, path=b"/v1/completions"),
    _post(INNER, path=b"/nowhere"),
    _post(b"", path=b"/v1/responses/resp_1/cancel"),
    _post(CHAT, path=b"http://router:8000/v1/chat/completions?a=b"),
    _post(SHORT, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAAA"),
    _post(b"\xff\x00\r\n\r\n0\r\n\r\n", b"Content-Type: application/octet-stream"),
    _chunks(SHORT[:7], SHORT[7:]),
    _chunks(CHAT, last=b"0\r\nX-Trailer: 1\r\n\r\n", lines=(b"Trailer: X-Trailer",)),
    _chunks(INNER, lines=(b"Connection: keep-alive",)),
    _chunks(),
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b'00F;name=value;q="x"\r\n' + SHORT + b"\r\n0\r\n\r\n",
)


def _named(name: bytes, *values: bytes) -> tuple[bytes, ...]:
    return tuple(name + b": " + value for value in values)


LENGTH, CODING, CONNECTION = b"Content-Length", b"Transfer-Encoding", b"Connection"
# Header lines that servers have read differently (request smuggling).
LINES: tuple[bytes, ...] = (
    *_named(LENGTH, b"0", b"5", b"15"),
    b"content-length:15",
    *_named(LENGTH, b"00015", b"0" * 5000 + b"7", b"+15", b"-1", b"15, 15", b"15,0", b"0x0f"),
    *_named(LENGTH, b"1 5", b"15\t", b"\x0b15", b"1_5", b"\xd9\xa1", b"99999999999999999999"),
    *_named(LENGTH, b"18446744073709551616", b"18446744073709551615", b"1e1"),
    b"Content-Length:",
    b"Content-Length",
    b"Content-Length : 15",
    b"Content_Length: 15",
    b"Content-Length\x00: 15",
    b"Transfer-Encoding: chunked",
    b"transfer-encoding:chunked",
    *_named(CODING, b"CHUNKED", b"chunked "),
    b"Transfer-Encoding:\tchunked",
    *_named(CODING, b"\x0bchunked", b"chunked, chunked", b"identity, chunked"),
    *_named(CODING, b"chunked, identity", b"gzip, chunked", b"identity", b"xchunked"),
    *_named(CODING, b"chunked;q=1", b'"chunked"', b",chunked", b"chunked,"),
    b"Transfer-Encoding:",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding\t: chunked",
    b"Transfer_Encoding: chunked",
    *_named(b"X", b"y\rTransfer-Encoding: chunked", b"y\nTransfer-Encoding: chunked"),
    *_named(b"X", b"y\r\n Transfer-Encoding: chunked", b"y\r\n\tz"),
    b" X: y",
    b": y",
    b"X",
    b"X:",
    *_named(b"X", b"\x00", b"\x7f", b"\x80\xff", b"y" * 3000),
    b"X" * 3000 + b": y",
    b"X\xff: y",
    b"X(: y",
    b"Host: other",
    b"Host:",
    b"Host: a, b",
    *_named(CONNECTION, b"close", b"keep-alive", b"content-length", b"transfer-encoding, host"),
    *_named(CONNECTION, b"authorization, x-request-id, content-type", b"Upgrade"),
    b"Proxy-Connection: keep-alive",
    *_named(b"Upgrade", b"h2c", b"websocket"),
    *_named(b"Expect", b"100-continue", b"200-ok"),
    b"TE: trailers",
    b"Trailer: Content-Length",
    *_named(b"X-Request-Id", b"\x80", b"a\t b"),
    b"Authorization: Bearer other",
    b"HTTP2-Settings: AAMAAABkAAQAAP__",
)
STARTS: tuple[bytes, ...] = (
    b"CONNECT worker:80 HTTP/1.1",
    b"POST /v1/completions HTTP/1.0",
    b"POST /v1/completions HTTP/1.2",
    b"POST /v1/completions HTTP/2.0",
    b"POST /v1/completions HTTP/0.9",
    b"POST /v1/completions http/1.1",
    b"POST /v1/completions HTTP/1.1 ",
    b"POST  /v1/completions HTTP/1.1",
    b"POST\t/v1/completions HTTP/1.1",
    b"POST /v1/completions  HTTP/1.1",
    b"POST /v1/completions",
    b"post /v1/completions HTTP/1.1",
    b"PUT /v1/completions HTTP/1.1",
    b"QUERY /v1/completions HTTP/1.1",
    b"SOURCE /ice HTTP/1.1",
    b"PRI * HTTP/2.0",
    b"POST http://a/v1/completions HTTP/1.1",
    b"POST https://u:p@a:99/v1/completions?q#f HTTP/1.1",
    b"POST http://a?x HTTP/1.1",
    b"POST http:///x HTTP/1.1",
    b"POST //a/v1/completions HTTP/1.1",
    b"POST v1/completions HTTP/1.1",
    b"POST /v1/completions#x HTTP/1.1",
    b"POST /v1/../v1/completions HTTP/1.1",
    b"POST /v1/completions%0d%0aX: HTTP/1.1",
    b"POST /v1/\xffcompletions HTTP/1.1",
    b"POST " + b"/x" * 4000 + b" HTTP/1.1",
    b"OPTIONS /v1/completions HTTP/1.1",
    b" POST /v1/completions HTTP/1.1",
)
SIZES: tuple[bytes, ...] = (
    b"0",
    b"00",
    b"5",
    b"f",
    b"F;x",
    b'f;x="a;b"',
    b"f;x=\ny",
    b"f ;x",
    b"f\t",
    b" f",
    b"0xf",
    b"+f",
    b"-f",
    b"-1",
    b"g",
    b"",
    b"ffffffffffffffff",
    b"10000000000000000f",
    b"000000000000000000f",
    b"f;" + b"x" * 2000,
    b"f\x00",
)
ENDS: tuple[bytes, ...] = (b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\r\n", b"\r\n ", b"\x0b", b"")

ANSWERS: tuple[bytes, ...] = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nServer: uvicorn\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 15\r\n\r\n" + SHORT,
    b"HTTP/1.1 503 \r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 429 Busy\r\nRetry-After: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nDate: x\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}",
    b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{}",
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: X-A\r\nX-A: 1\r\n\r\n"
    b"2;x=y\r\n{}\r\n0\r\nX-T: 1\r\n\r\n",
)
STATUS_LINES: tuple[bytes, ...] = (
    b"HTTP/1.1 101 Switching Protocols",
    b"HTTP/1.1 100 Continue",
    b"HTTP/1.1 200",
    b"HTTP/1.1 99 Low",
    b"HTTP/1.1 000 Zero",
    b"HTTP/1.1 999 High",
    b"HTTP/1.1 1000 Higher",
    b"HTTP/1.1 2OO OK",
    b"HTTP/1.1 -200 OK",
    b"HTTP/1.1  200 OK",
    b"HTTP/2.0 200 OK",
    b"HTTP/0.9 200 OK",
    b"HTTP/1.1 204 None",
    b"HTTP/1.1 304 Same",
    b"ICY 200 OK",
    b"SSH-2.0-OpenSSH_9.6",
    b"HTTP/1.1 200 \x00",
    b"HTTP/1.1 500 " + b"x" * 3000,
)

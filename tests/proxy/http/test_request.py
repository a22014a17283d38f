"""The request parser: bytes in pieces of any size, refusals, and the lines sent on."""

from __future__ import annotations

import pytest

from proxy.core.model.refusals import RefusedError
from proxy.http.body_budget import BodyBudget
from proxy.http.request import Request
from proxy.http.request_parser import PIPELINED_REQUEST_BYTES, HttpRequestParser, ParserState
from tests.fuzz.judge import set_route

START = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n"
MAX_HEAD, MAX_BODY = 2000, 5000


def make_parser() -> HttpRequestParser:
    return HttpRequestParser(set_route, max_head=MAX_HEAD, max_body=MAX_BODY)


def read(data: bytes, size: int | None = None) -> list[Request]:
    parser = make_parser()
    for at in range(0, len(data), size or len(data)):
        parser.feed(data[at : at + (size or len(data))])
    return list(parser.ready)


def outcome(parser: HttpRequestParser, data: bytes) -> object:
    """Feed the bytes and return everything that was parsed."""
    try:
        parser.feed(data)
    except RefusedError as error:
        return error.refusal, parser.state, parser.path, parser.request_id
    found = [(request.body, request.head.start, request.head.lines) for request in parser.ready]
    return found, parser.state


def status(data: bytes) -> int:
    with pytest.raises(RefusedError) as refused:
        read(data)
    return refused.value.refusal.status


def post(body: bytes = b"{}", *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return START + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("size", [None, 1, 7])
def test_pipelined_requests_are_parsed(size: int | None) -> None:
    """No extension of a chunk, trailer or body of a refused request is another request's part."""
    chunked = (
        START + b"tRANSFER-eNCODING:  Chunked \r\n\r\n"
        b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nAuthorization: T\r\nX: 1\r\n\r\n"
    )
    get = b"GET /v1/responses/r?x=1 HTTP/1.1\r\nHost: h\r\n\r\n"
    refused = post(get).replace(b"/v1/completions", b"/nowhere")
    data = post(b"one") + chunked + get + post(b"") + refused + post(b"two") + post(b"three")
    found = read(data, size)
    bodies = [b"one", b"abcde", b"", b"", b"", b"two", b"three"]
    assert [request.body for request in found] == bodies
    assert [request.head.refusal is not None for request in found] == [False] * 4 + [
        True,
        False,
        False,
    ]
    assert all(request.head.lines == request.head.authorization == b"" for request in found)
    assert found[2].head.method == "GET"
    assert found[2].head.target == b"/v1/responses/r?x=1"
    assert found[2].head.path == "/v1/responses/r"


@pytest.mark.parametrize("size", [None, 1, 50])
def test_repeated_head_parses_the_same(size: int | None) -> None:
    bodies = [b"a", b"b" * 1000, b"", b"c" * 99]
    data = [post(body, b"X-Y: z", b"X-Request-Id: i") for body in bodies]
    parser = make_parser()
    for request in data:
        for at in range(0, len(request), size or len(request)):
            parser.feed(request[at : at + (size or len(request))])
    heads = [request.head for request in parser.ready]
    assert [request.body for request in parser.ready] == bodies
    assert [request.id for request in parser.ready] == [b"i"] * 4
    assert all(head.lines == b"X-Y: z\r\n" for head in heads)
    if size is None:
        assert all(head is heads[0] for head in heads)


@pytest.mark.parametrize(
    "replacement",
    [
        b"X: 2\r\nContent-Length: 1",
        b"x: 1\r\nContent-Length: 1",
        b"X: 1\r\nContent-Length: 1 ",
        b"X: 1\r\nContent-Length: +1",
        b"X: 1\r\nContent-Length: ",
        b"X: 1\r\nContent-Length: 1\n",
        b"X: 1\r\nContent-Length: 1\r\nContent-Length: 1",
        b"X: 1\r\nContent-Length: 6000",
        b"X: 1\r\nContent-Length: 99999999999999999999",
        b"X: 1\r\nTransfer-Encoding: chunked",
    ],
)
def test_changed_head_parses_as_on_a_new_connection(replacement: bytes) -> None:
    named = b"X-Request-Id: i"
    other = post(b"b", named, b"X: 1").replace(b"X: 1\r\nContent-Length: 1", replacement)
    second = make_parser()
    second.feed(post(b"a", named, b"X: 1"))
    second.ready.clear()
    assert outcome(second, other) == outcome(make_parser(), other)


def test_any_changed_byte_of_a_cached_head_is_noticed() -> None:
    first = post(b"abc", b"X: 1")
    for at in range(len(first)):
        for byte in (b"\r", b"\n", b" ", b"\t", b":", b"0", b"2", b"9", b"a", b"-", b"\x00", b""):
            other = first[:at] + byte + first[at + 1 :]
            warm, fresh = make_parser(), make_parser()
            warm.feed(first)
            warm.ready.clear()
            assert outcome(warm, other) == outcome(fresh, other), other


def test_cached_head_is_parsed_wherever_it_is_cut() -> None:
    """Clients that write a header's name and value separately cut after `Content-Length: `."""
    first = post(b"abc", b"X: 1")
    for at in range(len(first) + 1):
        warm = make_parser()
        warm.feed(first)
        warm.ready.clear()
        warm.feed(first[:at])
        assert outcome(warm, first[at:]) == outcome(make_parser(), first), first[:at]


def test_several_requests_in_one_piece_cache_no_head() -> None:
    """The head read last is not the head at the begin of the bytes."""
    parser = make_parser()
    parser.feed(post(b"a", b"X-First: 1") + post(b"b", b"X-Other: 1"))
    parser.feed(post(b"c", b"X-First: 1"))
    assert parser.ready[2].head.lines == b"X-First: 1\r\n"


def test_body_limit_holds_with_a_cached_head_and_in_chunks() -> None:
    parser = make_parser()
    parser.feed(post(b"a"))
    parser.feed(post(b"b" * MAX_BODY))
    with pytest.raises(RefusedError, match="at most 5000 bytes"):
        parser.feed(post(b"b" * (MAX_BODY + 1)))
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    chunked = START + b"Transfer-Encoding: chunked\r\n\r\n"
    assert read(chunked + 5 * chunk + b"0\r\n\r\n")
    assert status(chunked + 6 * chunk) == 413


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://h/v1/completions", b"/v1/completions"),
        (b"http://h:8000/v1/completions?a=b", b"/v1/completions?a=b"),
        (b"http://h/v1/completions?", b"/v1/completions"),
        (b"http://user@h/v1/completions#there", b"/v1/completions"),
        (b"http://h?a=b", b"/?a=b"),
        (b"http://h", b"/"),
    ],
)
def test_absolute_url_target_is_sent_on_as_its_path(target: bytes, path: bytes) -> None:
    [request] = read(post().replace(b"/v1/completions", target))
    assert request.head.target == path
    assert request.head.start == b"POST %b HTTP/1.1\r\nHost: " % path


@pytest.mark.parametrize("target", [b"http:/v1", b"h:80", b"*x", b"v1/completions", b"http://:80/"])
def test_invalid_target_is_400(target: bytes) -> None:
    assert status(post().replace(b"/v1/completions", target)) == 400


def test_hop_and_router_headers_are_not_sent_on() -> None:
    [request] = read(
        post(
            b"{}",
            b"Content-Type: application/json",
            b"Authorization: Bearer k",
            b"Connection: keep-alive, X-Hop, Upgrade",
            b"X-Hop: 1",
            b"HTTP2-Settings: AAMAAABk",
            b"X-Explain: 0",
            b"X-Request-Deadline-Ms: 9000",
            b"X-Request-Id: a",
            b"Keep-Alive: timeout=5",
            b"TE: trailers",
            b"Proxy-Authorization: Basic x",
            b"Proxy-Connection: keep-alive",
            b"Trailer: X",
            b"Upgrade: websocket",
            b"X-Route: forged",
            b"traceparent: 00-1-2-01",
            b"Accept: */*",
        )
    )
    head = request.head
    assert head.start == b"POST /v1/completions HTTP/1.1\r\nHost: "
    assert head.authorization == b"Authorization: Bearer k\r\n"
    assert head.lines == (
        b"Content-Type: application/json\r\ntraceparent: 00-1-2-01\r\nAccept: */*\r\n"
    )


@pytest.mark.parametrize(
    ("head", "refused"),
    [
        (START + b"X: 1\n2: 3", 400),
        (START + b"Expect: 200-ok", 417),
        (START + b"Content-Length: 5001", 413),
        (START + b"X: " + b"y" * 3000, 431),
        (b"post /v1/completions HTTP/1.1\r\nHost: h", 400),
        (b"POST h:x/y HTTP/1.1\r\nHost: h", 400),
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nHost: h", 431),
        (b"POST /nowhere HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3", 404),
    ],
)
def test_bad_heads_are_refused(head: bytes, refused: int) -> None:
    assert status(head + b"\r\n\r\n") == refused


@pytest.mark.parametrize("size", [None, 100])
@pytest.mark.parametrize("before", [b"", post()])
@pytest.mark.parametrize("name", [b"X", b"TE", b"Connection", b"Authorization"])
def test_head_limit_is_independent_of_pieces(before: bytes, name: bytes, size: int | None) -> None:
    """With or without a request before it, and for headers that are not sent on."""
    assert read(before + post(b"{}", name + b": " + b"y" * 1500), size)
    with pytest.raises(RefusedError) as refused:
        read(before + post(b"{}", *[name + b": " + b"y" * 500] * 6), size)
    assert refused.value.refusal.status == 431


@pytest.mark.parametrize("size", [None, 1, 9])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 3\r\n\r\nabc", b"abc"),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"\r\n", b""),
    ],
)
def test_upgrade_is_ignored_and_the_body_read(
    framing: bytes, body: bytes, size: int | None
) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAAB\r\n"
    found = read(START + upgrade + b"X-Y: z\r\n" + framing + post(b"next"), size)
    assert [request.body for request in found] == [body, b"next"]
    assert found[0].head.lines == b"X-Y: z\r\n"


def test_bytes_after_connection_close_are_ignored() -> None:
    parser = make_parser()
    parser.feed(post(b"{}", b"Connection: close") + b"garbage")
    parser.feed(b"more of it")
    [request] = parser.ready
    assert not request.head.keep_alive


def test_rtsp_version_is_sent_on_as_http() -> None:
    [request] = read(post().replace(b"HTTP/1.1", b"RTSP/1.1"))
    assert request.head.start == b"POST /v1/completions HTTP/1.1\r\nHost: "
    assert status(post().replace(b"HTTP/1.1", b"RTSP/2.0")) == 505


def test_http_1_0_keeps_alive_only_on_request() -> None:
    old = b"POST /v1/completions HTTP/1.0\r\nContent-Length: 0\r\n"
    [plain] = read(old + b"\r\n")
    [kept] = read(old + b"Connection: keep-alive\r\n\r\n")
    assert (plain.head.keep_alive, kept.head.keep_alive) == (False, True)


def test_continue_is_owed_once() -> None:
    parser = make_parser()
    parser.feed(START + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
    assert parser.owes_continue()
    assert not parser.owes_continue()
    parser.feed(b"abc")
    assert parser.ready[0].body == b"abc"


def test_parser_state_follows_the_request() -> None:
    parser = make_parser()
    states = []
    for piece in (b"PO", START[2:], b"Content-Length: 2\r\n\r\n", b"a", b"b"):
        parser.feed(piece)
        states.append(parser.state)
    body = [ParserState.BODY] * 2
    assert states == [ParserState.HEAD, ParserState.HEAD, *body, ParserState.NOTHING]


def test_dropped_requests_are_neither_served_nor_held() -> None:
    budget = BodyBudget(100_000)
    parser = HttpRequestParser(set_route, max_head=MAX_HEAD, max_body=MAX_BODY, body_budget=budget)
    parser.feed(3 * post() + post(b"{}" * 500)[:-1])
    parser.charge_ready()
    assert (len(parser.ready), budget.held > 1000) == (3, True)
    parser.drop()
    assert (len(parser.ready), budget.held) == (0, 0)


def test_pipelined_requests_are_held_until_they_are_taken() -> None:
    bodies = b"{}", b"{}" * 200, b"", b"{}"
    sizes = [PIPELINED_REQUEST_BYTES + len(body) for body in bodies]
    budget = BodyBudget(100_000)
    parser = HttpRequestParser(set_route, max_head=MAX_HEAD, max_body=MAX_BODY, body_budget=budget)
    parser.feed(b"".join(map(post, bodies)))
    for left in range(len(bodies)):
        parser.charge_ready()
        assert budget.held == sum(sizes[left:])
        parser.request_taken(parser.ready.popleft())
    parser.charge_ready()
    assert budget.held == 0

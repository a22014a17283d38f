"""Response heads, framing and error endings written to clients."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.role import Role
from proxy.core.model.specs import Score, WorkerSpec
from proxy.core.model.types import Reason, Usage
from proxy.http.request import Request, RequestHead
from proxy.http.response_parser import ResponseParser
from proxy.wire.exchange.response_writer import BodyEdits, ResponseWriter, response_id_in

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def writer_for(
    head: bytes,
    *,
    http_1_0: bool = False,
    keep_alive: bool = True,
    explain: bool = False,
    cached: int | None = None,
    handover: bool = False,
    verdict: str = "",
) -> ResponseWriter:
    """Return a writer for a worker's response with this head."""
    reader = ResponseParser()
    reader.feed(head)
    assert reader.head is not None
    request_head = RequestHead()
    request_head.http_1_0, request_head.explain, request_head.id = http_1_0, explain, b"id-1"
    worker = Fleet().roster.add(WorkerSpec("s0", "http://h:1", Role.SHORT, "tiny"))
    decision = Decision(worker, Reason.SHORT_POOL, scores=(Score("s0", 0.5),), verdict=verdict)
    if handover:
        prefill = Fleet().roster.add(WorkerSpec("p0", "http://h:2", Role.PREFILL, "tiny"))
        decision.handover = HandoverDecision(prefill, 0, 9, 0.1, 0.1)
    request = Request(request_head, b"")
    return ResponseWriter(
        request,
        reader.head,
        decision,
        keep_alive=keep_alive,
        edits=BodyEdits(cached_tokens=cached),
    )


def test_content_length_is_kept() -> None:
    writer = writer_for(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX: y\r\n\r\n")
    assert writer.feed(b"", ended=False) == b""
    assert not writer.has_begun
    assert writer.feed(b"a", ended=False) == (
        b"HTTP/1.1 200 OK\r\nX: y\r\nX-Request-Id: id-1\r\nContent-Length: 3\r\n\r\na"
    )
    assert writer.has_begun
    assert writer.feed(b"bc", ended=True) == b"bc"


@pytest.mark.parametrize("head", [CHUNKED, b"HTTP/1.1 200 OK\r\n\r\n"])
def test_body_is_framed_in_new_chunks(head: bytes) -> None:
    writer = writer_for(head)
    assert writer.feed(b"a" * 17, ended=False).endswith(
        b"\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n" + b"a" * 17 + b"\r\n"
    )
    assert writer.feed(b"b", ended=True) == b"1\r\nb\r\n0\r\n\r\n"


def test_empty_body_is_written() -> None:
    assert writer_for(CHUNKED).feed(b"", ended=True).endswith(b"\r\n\r\n0\r\n\r\n")
    none = writer_for(b"HTTP/1.1 204 No Content\r\n\r\n").feed(b"", ended=True)
    assert none == b"HTTP/1.1 204 No Content\r\nX-Request-Id: id-1\r\n\r\n"


@pytest.mark.parametrize("http_1_0", [False, True])
@pytest.mark.parametrize(
    "framing", [b"Content-Length: 0", b"Content-Length: 5", b"Transfer-Encoding: chunked"]
)
def test_204_has_no_framing(framing: bytes, http_1_0: bool) -> None:
    """RFC 9110, 8.6: a client may read a Content-Length as a body's length."""
    writer = writer_for(b"HTTP/1.1 204 No Content\r\n%b\r\n\r\n" % framing, http_1_0=http_1_0)
    data = writer.feed(b"", ended=True)
    assert b"Content-Length" not in data
    assert b"Transfer-Encoding" not in data
    assert data.endswith(b"\r\n\r\n")
    assert writer.keep_alive


def test_304_keeps_its_content_length() -> None:
    writer = writer_for(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n")
    assert writer.feed(b"", ended=True).endswith(b"\r\nContent-Length: 5\r\n\r\n")


def test_http_1_0_gets_no_chunks() -> None:
    writer = writer_for(CHUNKED, http_1_0=True)
    assert writer.feed(b"a", ended=False).endswith(b"\r\nConnection: close\r\n\r\na")
    assert not writer.keep_alive
    assert writer.feed(b"", ended=True) == b""
    kept = writer_for(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", http_1_0=True)
    assert b"Connection: keep-alive\r\n" in kept.feed(b"", ended=True)


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
        SSE.replace(b"Transfer-Encoding: chunked", b"Content-Length: 99"),
        SSE.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"),
        SSE.replace(b"200 OK", b"400 Bad Request"),
    ],
)
def test_other_failed_bodies_get_no_error_event(head: bytes) -> None:
    writer = writer_for(head)
    writer.feed(b"a", ended=False)
    assert writer.final_error_event("gone", "worker_reset") is None


def test_usage_is_read_from_the_end_of_json() -> None:
    writer = writer_for(b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n\r\n")
    writer.feed(b'{"usage":{"prompt_', ended=False)
    writer.feed(b'tokens":7,"completion_tokens":2}}', ended=True)
    assert writer.usage() == Usage(7, 2)


@pytest.mark.parametrize(
    ("decision", "middle"),
    [
        ({}, b""),
        ({"handover": True}, b"prefill=p0; "),
        ({"verdict": "not_worth_it"}, b"handover=not_worth_it; "),
    ],
)
def test_explain_writes_the_route_header(decision: dict[str, Any], middle: bytes) -> None:
    data = writer_for(CHUNKED, explain=True, **decision).feed(b"x", ended=False)
    assert b"\r\nX-Route: s0; %breason=short_pool; s0=0.5000\r\n" % middle in data


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'HTTP/1.1 200 OK\r\n\r\n{"id":"resp_1f","object":"response"}', "resp_1f"),
        (b'data: {"response":{"id": "resp_1f"}}', "resp_1f"),
        (b'{"id":"chatcmpl-1"}', None),
        (b" " * 9000 + b'{"id":"resp_1f"}', None),
    ],
)
def test_id_of_a_stored_response_is_found(data: bytes, found: str | None) -> None:
    assert response_id_in(data) == found


WITH_USAGE = b'{"usage":{"prompt_tokens":2000,"prompt_tokens_details":{"cached_tokens":1999}}}'


@pytest.mark.parametrize("cut", [0, 1, 40, 70, len(WITH_USAGE)])
@pytest.mark.parametrize("cached", [64, 1024], ids=["shorter", "as long"])
def test_cached_tokens_of_json_are_corrected(cached: int, cut: int) -> None:
    length = b"Content-Length: %d\r\n" % len(WITH_USAGE)
    kind = b"Content-Type: application/json\r\n"
    writer = writer_for(b"HTTP/1.1 200 OK\r\n" + kind + length + b"\r\n", cached=cached)
    assert writer.feed(WITH_USAGE[:cut], ended=False) == b""
    head, _, body = writer.feed(WITH_USAGE[cut:], ended=True).partition(b"\r\n\r\n")
    assert body == WITH_USAGE.replace(b"1999", b"%d" % cached)
    assert head.count(b"\r\nContent-Length: ") == 1
    assert head.endswith(b"\r\nContent-Length: %d" % len(body))
    assert writer.usage() == Usage(2000, 0, cached)


def test_response_too_long_to_buffer_passes_unchanged() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999999\r\n\r\n"
    writer = writer_for(head, cached=64)
    sent = b"".join(writer.feed(b"x" * 100_000, ended=False) for _ in range(30))
    assert sent.endswith(b"x" * 3_000_000)
    assert writer.feed(WITH_USAGE, ended=True) == WITH_USAGE

"""What a client is sent of a worker's answer: head, framing, and the end if there is none."""

from __future__ import annotations

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.role import Role
from proxy.core.model.specs import Score, WorkerSpec
from proxy.core.model.types import Reason, Usage
from proxy.http.request import Request, RequestHead
from proxy.http.response_parser import ResponseParser
from proxy.wire.exchange.response_writer import ResponseWriter, response_id_in

EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answering(
    head: bytes,
    *,
    old: bool = False,
    keep_alive: bool = True,
    explain: bool = False,
    cached: int | None = None,
    handed: bool = False,
    whether: str = "",
) -> ResponseWriter:
    reader = ResponseParser()
    reader.feed(head)
    assert reader.head is not None
    request_head = RequestHead()
    request_head.http_1_0, request_head.explain, request_head.id = old, explain, b"id-1"
    worker = Fleet().roster.add(WorkerSpec("s0", "http://h:1", Role.SHORT, "tiny"))
    decision = Decision(worker, Reason.SHORT_POOL, scores=(Score("s0", 0.5),), whether=whether)
    if handed:
        prefill = Fleet().roster.add(WorkerSpec("p0", "http://h:2", Role.PREFILL, "tiny"))
        decision.handover = HandoverDecision(prefill, 0, 9, 0.1, 0.1)
    request = Request(request_head, b"")
    return ResponseWriter(
        request, reader.head, decision, keep_alive=keep_alive, cached_tokens=cached
    )


def test_a_fixed_length_is_kept() -> None:
    one = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX: y\r\n\r\n")
    assert one.take(b"", ended=False) == b""
    assert not one.has_begun
    assert one.take(b"a", ended=False) == (
        b"HTTP/1.1 200 OK\r\nX: y\r\nX-Request-Id: id-1\r\nContent-Length: 3\r\n\r\na"
    )
    assert one.has_begun
    assert one.take(b"bc", ended=True) == b"bc"


@pytest.mark.parametrize("head", [CHUNKED, b"HTTP/1.1 200 OK\r\n\r\n"])
def test_chunks_are_made_anew(head: bytes) -> None:
    one = answering(head)
    assert one.take(b"a" * 17, ended=False).endswith(
        b"\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n" + b"a" * 17 + b"\r\n"
    )
    assert one.take(b"b", ended=True) == b"1\r\nb\r\n0\r\n\r\n"


def test_an_empty_body_is_still_an_answer() -> None:
    assert answering(CHUNKED).take(b"", ended=True).endswith(b"\r\n\r\n0\r\n\r\n")
    none = answering(b"HTTP/1.1 204 No Content\r\n\r\n").take(b"", ended=True)
    assert none == b"HTTP/1.1 204 No Content\r\nX-Request-Id: id-1\r\n\r\n"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "framing", [b"Content-Length: 0", b"Content-Length: 5", b"Transfer-Encoding: chunked"]
)
def test_a_204_has_no_framing(framing: bytes, old: bool) -> None:
    """RFC 9110, 8.6: a client may take a length for that of a body."""
    one = answering(b"HTTP/1.1 204 No Content\r\n%b\r\n\r\n" % framing, old=old)
    data = one.take(b"", ended=True)
    assert b"Content-Length" not in data
    assert b"Transfer-Encoding" not in data
    assert data.endswith(b"\r\n\r\n")
    assert one.keep_alive


def test_a_304_keeps_the_length_that_a_200_would_have() -> None:
    one = answering(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n")
    assert one.take(b"", ended=True).endswith(b"\r\nContent-Length: 5\r\n\r\n")


def test_http_1_0_gets_no_chunks() -> None:
    one = answering(CHUNKED, old=True)
    assert one.take(b"a", ended=False).endswith(b"\r\nConnection: close\r\n\r\na")
    assert not one.keep_alive
    assert one.take(b"", ended=True) == b""
    kept = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", old=True)
    assert b"Connection: keep-alive\r\n" in kept.take(b"", ended=True)


def test_a_stream_that_fails_says_so() -> None:
    one = answering(SSE)
    one.take(EVENT + EVENT[:9], ended=False)
    last = one.last_words("gone", "worker_reset")
    assert last is not None
    size, event, end = last.split(b"\r\n", 2)
    assert int(size, 16) == len(event)
    assert event.startswith(b'data: {"error":{"message":"gone"')
    assert end == b"0\r\n\r\n"


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
def test_any_other_body_can_only_be_broken_off(head: bytes) -> None:
    one = answering(head)
    one.take(b"a", ended=False)
    assert one.last_words("gone", "worker_reset") is None


def test_usage_comes_from_the_tail_of_json() -> None:
    one = answering(b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n\r\n")
    one.take(b'{"usage":{"prompt_', ended=False)
    one.take(b'tokens":7,"completion_tokens":2}}', ended=True)
    assert one.usage() == Usage(7, 2)


def test_where_it_went_is_told_if_asked() -> None:
    one = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", explain=True)
    said = one.take(b"", ended=True)
    assert b"\r\nX-Route: s0; reason=short_pool; s0=0.5000\r\n" in said


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'HTTP/1.1 200 OK\r\n\r\n{"id":"resp_1f","object":"response"}', "resp_1f"),
        (b'data: {"response":{"id": "resp_1f"}}', "resp_1f"),
        (b'{"id":"chatcmpl-1"}', None),
        (b" " * 9000 + b'{"id":"resp_1f"}', None),
    ],
)
def test_the_id_of_a_stored_response(data: bytes, found: str | None) -> None:
    assert response_id_in(data) == found


WITH_USAGE = b'{"usage":{"prompt_tokens":2000,"prompt_tokens_details":{"cached_tokens":1999}}}'
ANEW = WITH_USAGE.replace(b"1999", b"64")


@pytest.mark.parametrize("cut", [0, 1, 40, 70, len(WITH_USAGE)])
def test_cached_tokens_of_a_json_answer_are_told_anew(cut: int) -> None:
    length = b"Content-Length: %d\r\n" % len(WITH_USAGE)
    kind = b"Content-Type: application/json\r\n"
    one = answering(b"HTTP/1.1 200 OK\r\n" + kind + length + b"\r\n", cached=64)
    assert one.take(WITH_USAGE[:cut], ended=False) == b""
    head, _, body = one.take(WITH_USAGE[cut:], ended=True).partition(b"\r\n\r\n")
    assert body == ANEW
    assert head.count(b"\r\nContent-Length: ") == 1
    assert head.endswith(b"\r\nContent-Length: %d" % len(ANEW))
    assert one.usage() == Usage(2000, 0, 64)


def test_an_answer_too_long_to_be_held_passes() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999999\r\n\r\n"
    one = answering(head, cached=64)
    sent = b"".join(one.take(b"x" * 100_000, ended=False) for _ in range(30))
    assert sent.endswith(b"x" * 3_000_000)
    assert one.take(WITH_USAGE, ended=True) == WITH_USAGE


def test_cached_tokens_of_a_stream_are_told_anew() -> None:
    one = answering(SSE, cached=64)
    assert one.take(EVENT, ended=False).endswith(EVENT + b"\r\n")
    last = b"data: " + WITH_USAGE + b"\n\n"
    sent = one.take(last, ended=True)
    assert b'"cached_tokens":64}' in sent
    assert sent.startswith(b"%x\r\n" % (len(last) - 2))


def test_both_workers_of_a_hand_over_are_named() -> None:
    told = answering(CHUNKED, explain=True, handed=True).take(b"x", ended=False)
    assert b"X-Route: s0; prefill=p0; reason=short_pool; s0=0.5000\r\n" in told


def test_why_it_was_not_handed_over_is_told() -> None:
    told = answering(CHUNKED, explain=True, whether="not_worth_it").take(b"x", ended=False)
    assert b"X-Route: s0; handover=not_worth_it; reason=short_pool; s0=0.5000\r\n" in told

"""Headers and the router's own responses, byte by byte."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from proxy.core.model.specs import Score
from proxy.core.model.types import Reason, Refusal
from proxy.http.headers import remove_headers, seconds, status_line, tokens
from proxy.http.local_responses import refuse, respond, route_header
from proxy.http.request import Request, RequestHead


def request_with(*, explain: bool) -> Request:
    head = RequestHead()
    head.explain, head.id = explain, b"id-1"
    return Request(head, b"")


def test_status_line_has_the_reason() -> None:
    assert status_line(200) == b"HTTP/1.1 200 OK\r\n"
    assert status_line(799) == b"HTTP/1.1 799 \r\n"


def test_without_removes_headers_by_name() -> None:
    lines = [b"A", b": ", b"1", b"\r\n", b"b-c", b": ", b"2", b"\r\n", b"D", b": ", b"", b"\r\n"]
    assert remove_headers(lines, [b"b-c", b"x"]) == [*lines[:4], *lines[8:]]
    assert tokens(b"Close , X-Y,") == [b"close", b"x-y", b""]


def test_seconds_parses_numbers_and_dates() -> None:
    assert seconds(b"3") == 3.0
    for nonsense in (
        b"-3", b"soon", b"", b"1e400", b"nan", b"9" * 400, b"0 Jan 0 0:0:0 +99999999999999999999",
        b"Sunday, 06-Nov-99999999999 08:49:37 GMT", b"Sun,-999990699999 Nov 1994 08:49:37 GMT",
        b"Mon, 99 Jan 2020 00:00:00 GMT",
    ):  # fmt: skip
        assert seconds(nonsense) is None, nonsense
    delay_s = seconds(formatdate(time.time() + 60, usegmt=True).encode())
    assert delay_s is not None
    assert 58 < delay_s <= 60


def test_answer_bytes() -> None:
    assert respond(200, b"{}", headers=[(b"X", b"y")]) == (
        b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Type: application/json\r\n"
        b"Connection: keep-alive\r\nContent-Length: 2\r\n\r\n{}"
    )
    bodiless = respond(200, b"{}", keep_alive=False, bodiless=True)
    assert b"Connection: close\r\nContent-Length: 2\r\n\r\n" in bodiless
    assert not bodiless.endswith(b"{}")


@pytest.mark.parametrize(("wait_s", "shown"), [(0.2, b"1"), (2.0, b"2"), (2.1, b"3")])
@pytest.mark.parametrize("explain", [False, True])
def test_refusal_has_retry_after(wait_s: float, shown: bytes, explain: bool) -> None:
    scores = (Score("s0", 0.0, note="down"), Score("l0", 0.25))
    refusal = Refusal(503, Reason.NO_WORKER, "none", retry_after_s=wait_s, scores=scores)
    response = refuse(refusal, request_with(explain=explain))
    assert b"\r\nRetry-After: %b\r\n" % shown in response
    assert b"\r\nX-Request-Id: id-1\r\n" in response
    route = b"\r\nX-Route: none; reason=no_worker; s0=0.0000 (down); l0=0.2500\r\n"
    assert (route in response) is (b"X-Route" in response) is explain


def test_route_header_shows_no_negative_zero() -> None:
    """Rounding may leave such a cost."""
    response = route_header("s0", Reason.SHORT_POOL, [Score("s0", -1e-12), Score("l0", -0.5)])
    assert response == b"s0; reason=short_pool; s0=0.0000; l0=-0.5000"


def test_refusal_without_a_request_has_no_request_id() -> None:
    response = refuse(Refusal(400, Reason.BAD_REQUEST, "no HTTP"), None, keep_alive=False)
    assert response.startswith(b"HTTP/1.1 400 Bad Request\r\nContent-Type")
    assert b"X-Request-Id" not in response

"""Headers, status lines and parse errors.

Ambiguous messages are refused, not repaired, to prevent request smuggling. llhttp's strict mode
refuses most; `request` and `response_parser` refuse the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from proxy.core.model.refusals import RefusedError
from proxy.core.model.types import Reason, Refusal
from proxy.core.request.session_key import AGENT
from proxy.core.request.session_key import HEADERS as SESSION_HEADERS

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

MAX_RETRY_AFTER_DIGITS = 10  # exclusive

# Headers that the router reads; True if they are forwarded unchanged. Hop-by-hop headers (RFC 9110,
# 7.6.1) are not; framing, Host and request id are rewritten.
REQUEST_HEADERS = {
    **dict.fromkeys((*SESSION_HEADERS, AGENT), True),
    b"accept": True,
    b"api-key": True,
    b"authorization": False,
    b"connection": False,
    b"content-encoding": True,
    b"content-length": False,
    b"content-type": True,
    b"endpoint-load-metrics-format": True,
    b"expect": False,
    b"host": False,
    b"http2-settings": False,
    b"keep-alive": False,
    b"origin": True,
    b"proxy-authorization": False,
    b"proxy-connection": False,
    b"te": False,
    b"traceparent": True,
    b"trailer": False,
    b"transfer-encoding": False,
    b"upgrade": False,
    b"x-api-key": True,
    b"x-data-parallel-rank": True,
    b"x-explain": False,
    b"x-request-deadline-ms": False,
    b"x-request-id": False,
    b"x-route": False,  # set in responses only
    b"x-vllm-priority": True,
}
RESPONSE_HEADERS = {
    b"connection": False,
    b"content-encoding": True,
    b"content-length": False,
    b"content-type": True,
    b"keep-alive": False,
    b"proxy-authenticate": False,
    b"proxy-connection": False,
    b"retry-after": True,
    b"te": False,
    b"trailer": False,
    b"transfer-encoding": False,
    b"upgrade": False,
    b"x-request-id": False,
    b"x-route": False,
}

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}


def malformed(message: str, status: int = 400) -> RefusedError:
    """Return a refusal that closes the connection: the next request's start is unknown."""
    return RefusedError(Refusal(status, Reason.BAD_REQUEST, message))


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def seconds(value: bytes) -> float | None:
    """Return the seconds of a Retry-After, which is a number or a date."""
    if value.isdigit():
        return float(value) if len(value) < MAX_RETRY_AFTER_DIGITS else None
    try:
        until = parsedate_to_datetime(value.decode("latin-1")).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(until - time.time(), 0.0)


def tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]


def remove_headers(lines: list[bytes], names: Iterable[bytes]) -> list[bytes]:
    """Remove headers, each of four pieces: name, colon, value, CRLF."""
    drop = frozenset(names)
    kept = [at for at in range(0, len(lines), 4) if lines[at].lower() not in drop]
    return [piece for at in kept for piece in lines[at : at + 4]]

"""The bytes of a request to a worker, without the client's hop-by-hop headers."""

from __future__ import annotations

import re

from proxy.http.headers import JSON
from proxy.http.request import Request
from proxy.wire.worker.connection import ConnectionPool

# Larger bodies are not copied behind their head.
MAX_JOINED_BYTES = 1 << 16


# A proxy in front of a worker may compress responses.
ACCEPT_ENCODING = re.compile(rb"^accept-encoding:[^\n]*\n", re.IGNORECASE | re.MULTILINE)
IDENTITY_ENCODING = b"Accept-Encoding: identity\r\n"


def post_json(
    path: bytes, pool: ConnectionPool, authorization: bytes, body: bytes
) -> tuple[bytes, ...]:
    """Return a request of the router's own; the worker's key replaces the client's."""
    key = pool.authorization or authorization
    start = b"POST %b HTTP/1.1\r\nHost: %b%b" % (path, pool.host, key)
    framing = b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (JSON, len(body))
    return (start + framing + body,)


def to_worker(
    request: Request, pool: ConnectionPool, body: bytes, request_id: bytes, *, plain: bool = False
) -> tuple[bytes, ...]:
    """Return the request for one worker, with the body and id of a leg.

    `plain`: forbid compression.
    """
    head = request.head
    lines = ACCEPT_ENCODING.sub(b"", head.lines) + IDENTITY_ENCODING if plain else head.lines
    authorization = pool.authorization or head.authorization
    own = b"X-Request-Id: %b\r\n\r\n" % request_id
    if (trace := request.trace) is not None:
        own = trace.leg(pool.spec.name, pool.spec.role) + own
    if body or head.method != "GET":
        own = b"Content-Length: %d\r\n%b" % (len(body), own)
    if len(body) > MAX_JOINED_BYTES:
        return b"".join((head.start, pool.host, authorization, lines, own)), body
    return (b"".join((head.start, pool.host, authorization, lines, own, body)),)

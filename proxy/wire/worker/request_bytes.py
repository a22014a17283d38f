"""The bytes of a request to a worker, without the client's hop-by-hop headers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.http.request import Request
    from proxy.wire.worker.connection import ConnectionPool

# Larger bodies are not copied behind their head.
MAX_JOINED_BYTES = 1 << 16


# A proxy in front of a worker may compress responses.
ACCEPT_ENCODING = re.compile(rb"^accept-encoding:[^\n]*\n", re.IGNORECASE | re.MULTILINE)
IDENTITY_ENCODING = b"Accept-Encoding: identity\r\n"


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

"""A request as a worker is to get it: the client's bytes, but for what is between two ends only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.http.request import Request
    from proxy.wire.worker.pool import ConnectionPool

# Bodies up to this size are sent in one piece with their head.
SMALL = 1 << 16


# What lies on the way to a worker may compress an answer for who says that it may.
ENCODINGS = re.compile(rb"^accept-encoding:[^\n]*\n", re.IGNORECASE | re.MULTILINE)
PLAIN = b"Accept-Encoding: identity\r\n"


def to_worker(
    request: Request, pool: ConnectionPool, body: bytes, request_id: bytes, *, plain: bool = False
) -> tuple[bytes, ...]:
    """Write it for one worker, with a body and an id that may be a leg's own.

    `plain`: the answer is for us, and must not be compressed.
    """
    head = request.head
    lines = ENCODINGS.sub(b"", head.lines) + PLAIN if plain else head.lines
    authorization = pool.authorization or head.authorization
    own = b"X-Request-Id: %b\r\n\r\n" % request_id
    if (trace := request.trace) is not None:
        own = trace.leg(pool.spec.name, pool.spec.role) + own
    if body or head.method != "GET":
        own = b"Content-Length: %d\r\n%b" % (len(body), own)
    if len(body) > SMALL:
        return b"".join((head.start, pool.host, authorization, lines, own)), body
    return (b"".join((head.start, pool.host, authorization, lines, own, body)),)

"""Pieces of a stream that pass on as they came.

Once an answer streams, nearly every read of a worker's connection brings one whole chunk of whole
events. Those very bytes, framing included, are what the client is to be sent: nothing is parsed,
cut or put together. Whatever else comes is left to the reader, which is between two chunks then,
as it was before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from proxy.http.sse import USAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.fleet.leases import Lease
    from proxy.core.router import Router
    from proxy.http.sse import EventStream
    from proxy.metrics.registry import Metrics
    from proxy.wire.exchange.request_record import RequestRecord

CHUNK_END = b"\n\n\r\n"
MOST_DIGITS = 4


@lru_cache(maxsize=1024)
def size_line(length: int) -> bytes:
    """Return how a chunk begins that is so long in all; nothing where none is."""
    for digits in range(1, MOST_DIGITS + 1):
        size = b"%x" % max(length - digits - 4, 0)
        if len(size) == digits and size != b"0":
            return size + b"\r\n"
    return b""


class StreamFastPath:
    """The way of one stream's pieces, from its first token on."""

    __slots__ = (
        "_count",
        "_keep",
        "_lease",
        "_metrics",
        "_record",
        "_recounts",
        "_router",
        "_write",
    )

    def __init__(
        self,
        router: Router,
        lease: Lease,
        metrics: Metrics,
        record: RequestRecord,
        stream: EventStream,
        write: Callable[[bytes], None],
        *,
        recounts: bool,
    ) -> None:
        self._router = router
        self._lease = lease
        self._metrics = metrics
        self._record = record
        self._keep = stream.keep  # for its usage
        self._count = stream.count
        self._write = write
        self._recounts = recounts  # whether its usage is not to pass as it is

    def take(self, now: float, data: bytes) -> bool:
        """Pass on what was read; False if it is not for here."""
        begin = size_line(len(data))
        if not begin or not data.startswith(begin) or not data.endswith(CHUNK_END):
            return False
        if self._recounts and USAGE in data:
            return False
        self._keep(data)
        record = self._record
        if tokens := self._count(data):
            self._router.tokens(self._lease, tokens)
            record.saw_tokens(now, self._metrics, tokens)
        record.sent_bytes += len(data)
        self._write(data)
        return True

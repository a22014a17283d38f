"""Fast path for stream chunks that pass on unchanged.

Nearly every read of a stream returns one whole chunk of whole events. Those bytes go to the client
without parsing. Other reads go to the parser, which is between two chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from proxy.core.fleet.leases import Lease
from proxy.core.lifecycle.lease_book import LeaseBook
from proxy.http.sse import USAGE, EventStream
from proxy.metrics.registry import Metrics
from proxy.wire.exchange.request_record import RequestRecord

CHUNK_END = b"\n\n\r\n"
MAX_SIZE_DIGITS = 4
TAIL_BYTES = 40
NOT_FINISHED = b'h_reason":null'  # in a chat's tail


@lru_cache(maxsize=1024)
def size_line(length: int) -> bytes:
    """Return the size line of a chunk of this total length; may be empty."""
    for digits in range(1, MAX_SIZE_DIGITS + 1):
        size = b"%x" % max(length - digits - 4, 0)
        if len(size) == digits and size != b"0":
            return size + b"\r\n"
    return b""


class StreamCounter:
    __slots__ = ("_lease", "_leases", "_metrics", "_record")

    def __init__(
        self, leases: LeaseBook, lease: Lease, metrics: Metrics, record: RequestRecord
    ) -> None:
        self._leases = leases
        self._lease = lease
        self._metrics = metrics
        self._record = record

    def count(self, now: float, tokens: int, num_bytes: int) -> None:
        if tokens:
            self._leases.record_tokens(self._lease, tokens)
            self._record.record_tokens(now, self._metrics, tokens)
        self._record.sent_bytes += num_bytes


class StreamFastPath:
    __slots__ = (
        "_changes_usage", "_counter", "_failures", "_keep", "_tail", "_tokens_in", "_write",
    )  # fmt: skip

    def __init__(
        self,
        counter: StreamCounter,
        stream: EventStream,
        write: Callable[[bytes], None],
        *,
        changes_usage: bool,
        failures: tuple[bytes, ...],
    ) -> None:
        """Create the path; `failures`: reports after which another worker may continue."""
        self._counter = counter
        self._keep = stream.keep  # for the usage
        self._tokens_in = stream.count
        self._write = write
        self._changes_usage = changes_usage
        self._tail = b""  # of the last piece
        self._failures = failures

    def pass_on(self, now: float, data: bytes) -> bool:
        """Pass on one chunk; False if the parser must read it."""
        begin = size_line(len(data))
        if not begin or not data.startswith(begin) or not data.endswith(CHUNK_END):
            return False
        if self._changes_usage and USAGE in data:
            return False
        if self._failures and (tail := data[-TAIL_BYTES:]) != self._tail:
            # Pieces of a chat end alike, except failures and the last one.
            for failure in self._failures:
                if failure in data:
                    return False
            if NOT_FINISHED in tail:
                self._tail = tail
        self._keep(data)
        self._counter.count(now, self._tokens_in(data), len(data))
        self._write(data)
        return True

"""Token counts from a worker, for estimates too close to a limit."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import orjson

from proxy.http.response_parser import OK, ResponseHead
from proxy.wire.worker.connection import ConnectionPool, WorkerConnection, WorkerError
from proxy.wire.worker.request_bytes import post_json

MAX_RESPONSE_BYTES = 1 << 20


class TokenizeRequest:
    """A request to `/tokenize`; `on_done` receives the count or None."""

    __slots__ = ("_answer", "_done", "_status", "connection", "deadline")
    timeout_s = inf

    def __init__(self, deadline: float, on_done: Callable[[float, int | None], None]) -> None:
        self.deadline = deadline
        self.connection: WorkerConnection | None = None
        self._done = on_done
        self._status = 0
        self._answer = b""

    def ask(self, now: float, pool: ConnectionPool, body: bytes, authorization: bytes) -> None:
        pool.send(now, self, post_json(b"/tokenize", pool, authorization, body))

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.drop()

    def expire(self, now: float) -> None:
        self.drop()
        self._done(now, None)

    def response_begun(self, now: float, head: ResponseHead) -> None:  # noqa: ARG002
        self._status = head.status

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        self._answer += body
        if ended:
            self.connection = None
            self._done(now, self._count() if self._status == OK else None)
        elif len(self._answer) > MAX_RESPONSE_BYTES:
            self.expire(now)

    def extra_wait_s(self, now: float) -> float:  # noqa: ARG002
        return 0.0

    def connection_failed(self, now: float, error: WorkerError) -> None:  # noqa: ARG002
        self.connection = None
        self._done(now, None)

    def _count(self) -> int | None:
        try:
            count = orjson.loads(self._answer)["count"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
        return count if isinstance(count, int) and count >= 0 else None

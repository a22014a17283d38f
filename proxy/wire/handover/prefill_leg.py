"""The prefill leg of a hand-over."""

from __future__ import annotations

from math import inf
from typing import Protocol

from proxy.http.response_parser import OK, ResponseHead
from proxy.wire.worker.connection import WorkerConnection, WorkerError

MAX_RESPONSE_BYTES = 64 << 20  # may list all token ids
# From head to end of the response: the worker keeps the blocks only briefly.
MAX_BODY_S = 10.0


class PrefillOwner(Protocol):
    connection: WorkerConnection | None

    def prefill_ended(self, now: float, response: bytes) -> None: ...

    def response_begun(self, now: float, head: ResponseHead) -> None:
        """Handle the head of an error."""

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        """Handle a piece of an error."""

    def connection_failed(self, now: float, error: WorkerError) -> None: ...


class PrefillLeg:
    __slots__ = ("_passes", "_pieces", "_size", "begun_at", "connection", "owner", "timeout_s")

    def __init__(self, owner: PrefillOwner, timeout_s: float) -> None:
        self.connection: WorkerConnection | None = None
        self.timeout_s = timeout_s
        self.begun_at = inf  # end of the prefill
        self.owner = owner
        self._pieces: list[bytes] = []
        self._size = -1  # until the response begins
        self._passes = False  # an error, passed to the owner

    @property
    def is_answering(self) -> bool:
        """True if the response has begun: the prefill is done."""
        return self._size >= 0

    @property
    def is_sent(self) -> bool:
        """True if the prefill may have started."""
        return self.connection is not None and self.connection.is_open

    def response_begun(self, now: float, head: ResponseHead) -> None:
        """Keep a successful response; pass on an error."""
        if head.status == OK:
            self._size = 0
            self.begun_at = now
            self._limit_rest()
            return
        self._passes = True
        self.owner.connection = self.connection
        self.owner.response_begun(now, head)

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        if self._passes:
            self.owner.body_received(now, body, ended)
            return
        self._pieces.append(body)
        self._size += len(body)
        if ended:
            self.connection = None
            self.owner.prefill_ended(now, b"".join(self._pieces))
        elif self._size > MAX_RESPONSE_BYTES and self.connection is not None:
            self.connection.drop()
            self.connection_failed(now, WorkerError.BROKEN)
        else:
            self._limit_rest()

    def _limit_rest(self) -> None:
        if self.connection is not None:
            deadline = self.connection.deadline
            self.connection.deadline = min(deadline, self.begun_at + MAX_BODY_S)

    def extra_wait_s(self, now: float) -> float:  # noqa: ARG002
        return 0.0

    def connection_failed(self, now: float, error: WorkerError) -> None:
        self.connection = None
        self.owner.connection_failed(now, error)

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.drop()
            self.connection = None

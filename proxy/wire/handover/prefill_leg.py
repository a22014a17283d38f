"""The first leg of a hand-over: a worker prefills, and its answer is for us, unless it says no."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Protocol

from proxy.http.response_parser import OK
from proxy.wire.worker.connection import WorkerError

if TYPE_CHECKING:
    from proxy.http.response_parser import ResponseHead
    from proxy.wire.worker.connection import WorkerConnection
    from proxy.wire.worker.pool import ConnectionPool

MAX_ANSWER = 64 << 20  # it may repeat a long prompt's token ids
# It is written in one go, and what it tells of is not kept for long.
REST_S = 10.0


class PrefillOwner(Protocol):
    """Whoever wants the prefill done."""

    connection: WorkerConnection | None

    def prefilled(self, now: float, answer: bytes) -> None:
        """Hear that it is done."""

    def begun(self, now: float, head: ResponseHead) -> None:
        """Hear what begins as the answer to the client: the worker has said no."""

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Take a piece of that."""

    def lost(self, now: float, trouble: WorkerError) -> None:
        """Hear that there will be no (more of the) answer."""


class PrefillLeg:
    """One of them. Its owner hears of it, or whoever it is left to."""

    __slots__ = ("_owner", "_passes", "_pieces", "_size", "begun_at", "connection", "patience_s")

    def __init__(self, owner: PrefillOwner, patience_s: float) -> None:
        self.connection: WorkerConnection | None = None
        self.patience_s = patience_s
        self.begun_at = inf  # by then the prefill was done
        self._owner = owner
        self._pieces: list[bytes] = []
        self._size = -1  # until an answer has begun
        self._passes = False  # the answer is the client's

    def send(self, now: float, pool: ConnectionPool, request: tuple[bytes, ...]) -> None:
        """Send it."""
        pool.send(now, self, request)

    @property
    def is_answering(self) -> bool:
        """Whether the prefill is done and its answer is on its way."""
        return self._size >= 0

    @property
    def is_sent(self) -> bool:
        """Whether the worker may have begun with it."""
        return self.connection is not None and self.connection.is_open

    def leave_to(self, owner: PrefillOwner) -> None:
        """Let somebody else hear the rest."""
        self._owner = owner

    def begun(self, now: float, head: ResponseHead) -> None:
        """See whether it is an answer for us."""
        if head.status == OK:
            self._size = 0
            self.begun_at = now
            self._hurry()
            return
        self._passes = True
        self._owner.connection = self.connection
        self._owner.begun(now, head)

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Collect the answer."""
        if self._passes:
            self._owner.received(now, body, ended)
            return
        self._pieces.append(body)
        self._size += len(body)
        if ended:
            self.connection = None
            self._owner.prefilled(now, b"".join(self._pieces))
        elif self._size > MAX_ANSWER and self.connection is not None:
            self.connection.drop()
            self.lost(now, WorkerError.BROKEN)
        else:
            self._hurry()

    def _hurry(self) -> None:
        """Wait for the rest no longer than that may take."""
        if self.connection is not None:
            deadline = self.connection.deadline
            self.connection.deadline = min(deadline, self.begun_at + REST_S)

    def late(self, now: float) -> float:  # noqa: ARG002
        """Wait no longer."""
        return 0.0

    def lost(self, now: float, trouble: WorkerError) -> None:
        """Pass it on."""
        self.connection = None
        self._owner.lost(now, trouble)

    def drop(self) -> None:
        """Let the worker stop."""
        if self.connection is not None:
            self.connection.drop()
            self.connection = None

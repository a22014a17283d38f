"""Having a prefill worker's blocks freed that no decode leg will fetch.

They would be kept for half a minute else. A decode worker that refuses a request before it is
scheduled tells the prefill worker that nobody will come, so it is sent one that it must refuse.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import orjson

from proxy.transfer.types import Pair, Taken
from proxy.wire.http import JSON

if TYPE_CHECKING:
    from proxy.core.worker import Worker
    from proxy.wire.response import Head
    from proxy.wire.server import Wire
    from proxy.wire.worker_connection import Trouble, WorkerConnection

RELEASED, LEFT = "released", "left_to_expire"
# With these it was refused by what knows of the connector; a 401, say, comes from before that.
FREES = frozenset([400, 404])
PATIENCE_S = 20.0  # well under the time after which they are freed anyway


class Release:
    """One such request."""

    __slots__ = ("_status", "_wire", "connection", "deadline")
    once = True
    patience_s = inf

    def __init__(self, wire: Wire, deadline: float) -> None:
        self.connection: WorkerConnection | None = None
        self.deadline = deadline
        self._wire = wire
        self._status = 0

    def begun(self, now: float, head: Head) -> None:  # noqa: ARG002
        """Note how it was refused."""
        self._status = head.status

    def received(self, now: float, body: bytes, ended: bool) -> None:  # noqa: ARG002
        """Count it once the refusal is there."""
        if ended:
            self.connection = None
            self._over(RELEASED if self._status in FREES else LEFT)

    def lost(self, now: float, trouble: Trouble) -> None:  # noqa: ARG002
        """Give up: the blocks expire in time."""
        self.connection = None
        self._over(LEFT)

    def expire(self, now: float) -> None:  # noqa: ARG002
        """Wait no longer."""
        if self.connection is not None:
            self.connection.drop()
        self._over(LEFT)

    def _over(self, how: str) -> None:
        self._wire.release_over(self)
        self._wire.metrics.handover_ended(how)


class Orphan:
    """Takes the answer to a prefill whose client left just before it was there."""

    __slots__ = ("_authorization", "_decode", "_pair", "_wire", "connection")

    def __init__(self, wire: Wire, pair: Pair, decode: Worker, authorization: bytes) -> None:
        self.connection: WorkerConnection | None = None
        self._wire, self._pair = wire, pair
        self._decode, self._authorization = decode, authorization

    def prefilled(self, now: float, answer: bytes) -> None:
        """Have the blocks freed."""
        connector = self._wire.connector
        taken = Taken() if connector is None else connector.take(self._pair, read(answer))
        release(self._wire, now, self._decode, taken, self._authorization)

    def begun(self, now: float, head: Head) -> None:
        """Hear what can't be: the answer has begun before."""

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Hear nothing."""

    def lost(self, now: float, trouble: Trouble) -> None:  # noqa: ARG002
        """Give up."""
        self._wire.metrics.handover_ended(LEFT)


def read(answer: bytes) -> dict[str, Any]:
    """Read a prefill's answer; there is nothing in one that makes no sense."""
    try:
        fields = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return {}
    return fields if type(fields) is dict else {}


def release(
    wire: Wire, now: float, decode: Worker, taken: Taken, authorization: bytes, *, well: bool = True
) -> None:
    """Have what was taken freed: through a decode worker, or if it is not well through another."""
    body = wire.connector.release(taken) if wire.connector is not None else None
    if body is None:
        if taken.params is not None:
            wire.metrics.handover_ended(LEFT)
        return
    if not well:
        others = (w for w in wire.router.fleet.of(decode.model) if w.live and w is not decode)
        found = next((w for w in others if w.role is decode.role and w.breaker.closed), None)
        if found is None:
            wire.metrics.handover_ended(LEFT)
            return
        decode = found
    pool = wire.pools.of(decode)
    who = pool.authorization or authorization
    start = b"POST /v1/completions HTTP/1.1\r\nHost: %b%b" % (pool.host, who)
    framing = b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (JSON, len(body))
    question = Release(wire, now + PATIENCE_S)
    wire.releases.add(question)
    pool.send(now, question, (start + framing + body,))

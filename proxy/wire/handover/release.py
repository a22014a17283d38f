"""Having a prefill worker's blocks freed that no decode leg will fetch.

They would be kept for half a minute else. A decode worker that refuses a request before it is
scheduled tells the prefill worker that nobody will come, so it is sent one that it must refuse.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import orjson

from proxy.core.model.role import Role
from proxy.http.headers import JSON
from proxy.transfer.types import Pair, PrefillResult

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.http.response_parser import ResponseHead
    from proxy.wire.context import WireContext
    from proxy.wire.handover.prefill_leg import PrefillLeg
    from proxy.wire.worker.connection import WorkerConnection, WorkerError

RELEASED, LEFT = "released", "left_to_expire"
# With these it was refused by what knows of the connector; a 401, say, comes from before that.
FREES = frozenset([400, 404])
# Well under the time after which they are freed anyway.
PATIENCE_S, TRIES = 5.0, 3
GRACE_S = 1.0  # for a prefill that should be done by now, and whose client has left


class BlockRelease:
    """Has one prefill's blocks freed: by a decode worker, or if that fails by another."""

    __slots__ = ("_authorization", "_body", "_status", "_tried", "_wire", "connection", "deadline")
    patience_s = inf

    def __init__(self, wire: WireContext, body: bytes, authorization: bytes) -> None:
        self.connection: WorkerConnection | None = None
        self.deadline = inf
        self._wire = wire
        self._body = body
        self._authorization = authorization
        self._tried: list[Worker] = []
        self._status = 0

    def send(self, now: float, decode: Worker) -> None:
        """Send a decode worker what it must refuse."""
        wire, body = self._wire, self._body
        self._tried.append(decode)
        self._status = 0
        self.deadline = now + PATIENCE_S
        pool = wire.pools.of(decode)
        who = pool.authorization or self._authorization
        start = b"POST /v1/completions HTTP/1.1\r\nHost: %b%b" % (pool.host, who)
        framing = b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (JSON, len(body))
        wire.release_began(self)
        pool.send(now, self, (start + framing + body,))

    def begun(self, now: float, head: ResponseHead) -> None:  # noqa: ARG002
        """Note how it was refused."""
        self._status = head.status

    def received(self, now: float, body: bytes, ended: bool) -> None:  # noqa: ARG002
        """Count it once the refusal is there."""
        if not ended:
            return
        self.connection = None
        if self._status in FREES:
            self._over(RELEASED)
        else:
            self.elsewhere(now, self._tried[-1])

    def late(self, now: float) -> float:  # noqa: ARG002
        """Wait no longer."""
        return 0.0

    def lost(self, now: float, trouble: WorkerError) -> None:  # noqa: ARG002
        """Ask another."""
        self.connection = None
        self.elsewhere(now, self._tried[-1])

    def expire(self, now: float) -> None:
        """Wait no longer for this one."""
        if self.connection is not None:
            self.connection.drop()
            self.connection = None
        self.elsewhere(now, self._tried[-1])

    def elsewhere(self, now: float, decode: Worker) -> None:
        """Ask another in place of a decode worker; without one, the blocks expire in time."""
        left = [w for w in others(self._wire, decode) if w not in self._tried]
        if left and len(self._tried) < TRIES:
            self.send(now, left[0])
        else:
            self._over(LEFT)

    def _over(self, how: str) -> None:
        self._wire.release_over(self)
        self._wire.metrics.handover_ended(how)


class AbandonedPrefill:
    """Takes the answer to a prefill whose client left when it was done, or nearly so."""

    __slots__ = ("_authorization", "_decode", "_leg", "_pair", "_wire", "connection", "deadline")

    def __init__(
        self, wire: WireContext, pair: Pair, decode: Worker, authorization: bytes, leg: PrefillLeg
    ) -> None:
        self.connection: WorkerConnection | None = None
        self.deadline = inf
        self._wire, self._pair = wire, pair
        self._decode, self._authorization = decode, authorization
        self._leg = leg

    def adopt(self, now: float) -> None:
        """Wait for it, a little."""
        self.deadline = now + GRACE_S
        self._wire.release_began(self)
        self._leg.leave_to(self)

    def prefilled(self, now: float, answer: bytes) -> None:
        """Have the blocks freed."""
        connector = self._wire.connector
        taken = PrefillResult() if connector is None else connector.taken(self._pair, read(answer))
        release(self._wire, now, self._decode, taken, self._authorization)
        self._wire.release_over(self)

    def begun(self, now: float, head: ResponseHead) -> None:  # noqa: ARG002
        """Hear that it was refused: nothing is held for it."""
        self._leg.drop()
        self._wire.release_over(self)

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Hear nothing."""

    def lost(self, now: float, trouble: WorkerError) -> None:  # noqa: ARG002
        """Give up: if it had begun to answer, blocks are held for it."""
        if self._leg.is_answering:
            self._wire.metrics.handover_ended(LEFT)
        self._wire.release_over(self)

    def expire(self, now: float) -> None:  # noqa: ARG002
        """Let the prefill stop: it takes longer than was thought. An answer has longer to come."""
        if self._leg.is_answering:
            self.deadline = inf  # its connection has one of its own
            return
        self._leg.drop()
        self._wire.release_over(self)


def others(wire: WireContext, decode: Worker) -> list[Worker]:
    """List whom else than a decode worker one may ask to have blocks freed."""
    return [
        worker
        for worker in wire.router.fleet.of(decode.model)
        if worker.role is Role.DECODE and worker is not decode and worker.up and not worker.barred
    ]


def read(answer: bytes) -> dict[str, Any]:
    """Read a prefill's answer; there is nothing in one that makes no sense."""
    try:
        fields = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return {}
    return fields if type(fields) is dict else {}


def release(
    wire: WireContext,
    now: float,
    decode: Worker,
    taken: PrefillResult,
    authorization: bytes,
    *,
    well: bool = True,
) -> None:
    """Have what was taken freed: through a decode worker, or if it is not well through another."""
    body = wire.connector.release(taken) if wire.connector is not None else None
    if body is None:
        if taken.params is not None:
            wire.metrics.handover_ended(LEFT)
        return
    question = BlockRelease(wire, body, authorization)
    if well:
        question.send(now, decode)
    else:
        question.elsewhere(now, decode)

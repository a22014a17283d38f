"""Release of prefilled KV blocks that no decode leg will fetch.

The prefill worker would keep them for 30 s. A decode worker frees the blocks of a request that it
refuses before scheduling, so the router sends a request that must be refused.
"""

from __future__ import annotations

from math import inf
from typing import Any

import orjson

from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.http.response_parser import ResponseHead
from proxy.transfer.types import Pair, PrefillResult
from proxy.wire.context import WireContext
from proxy.wire.handover.prefill_leg import PrefillLeg
from proxy.wire.worker.connection import WorkerConnection, WorkerError
from proxy.wire.worker.request_bytes import post_json

RELEASED, LEFT_TO_EXPIRE = "released", "left_to_expire"
# Refusals after the connector has the parameters; a 401 comes before.
RELEASE_STATUSES = frozenset([400, 404])
RELEASE_TIMEOUT_S, MAX_RELEASE_TRIES = 5.0, 3
ABANDONED_GRACE_S = 1.0  # for an abandoned prefill that is nearly done


class BlockRelease:
    """Frees one prefill's blocks through a decode worker, with retries."""

    __slots__ = ("_authorization", "_body", "_status", "_tried", "_wire", "connection", "deadline")
    timeout_s = inf

    def __init__(self, wire: WireContext, body: bytes, authorization: bytes) -> None:
        self.connection: WorkerConnection | None = None
        self.deadline = inf
        self._wire = wire
        self._body = body
        self._authorization = authorization
        self._tried: list[Worker] = []
        self._status = 0

    def send(self, now: float, decode: Worker) -> None:
        wire = self._wire
        self._tried.append(decode)
        self._status = 0
        self.deadline = now + RELEASE_TIMEOUT_S
        pool = wire.pools.pool_for(decode)
        wire.releases.add(self)
        request = post_json(b"/v1/completions", pool, self._authorization, self._body)
        pool.send(now, self, request)

    def response_begun(self, now: float, head: ResponseHead) -> None:  # noqa: ARG002
        self._status = head.status

    def body_received(self, now: float, body: bytes, ended: bool) -> None:  # noqa: ARG002
        """Count the release, or retry it."""
        if not ended:
            return
        self.connection = None
        if self._status in RELEASE_STATUSES:
            self._end_release(RELEASED)
        else:
            self.send_elsewhere(now, self._tried[-1])

    def extra_wait_s(self, now: float) -> float:  # noqa: ARG002
        return 0.0

    def connection_failed(self, now: float, error: WorkerError) -> None:  # noqa: ARG002
        self.connection = None
        self.send_elsewhere(now, self._tried[-1])

    def expire(self, now: float) -> None:
        if self.connection is not None:
            self.connection.drop()
            self.connection = None
        self.send_elsewhere(now, self._tried[-1])

    def send_elsewhere(self, now: float, decode: Worker) -> None:
        left = [w for w in other_decode_workers(self._wire, decode) if w not in self._tried]
        if left and len(self._tried) < MAX_RELEASE_TRIES:
            self.send(now, left[0])
        else:
            self._end_release(LEFT_TO_EXPIRE)

    def _end_release(self, how: str) -> None:
        self._wire.remove_release(self)
        self._wire.metrics.handovers.count_end(how)


class AbandonedPrefill:
    """A nearly complete prefill leg without a client."""

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
        self.deadline = now + ABANDONED_GRACE_S
        self._wire.releases.add(self)
        self._leg.owner = self

    def prefill_ended(self, now: float, response: bytes) -> None:
        result, connector = PrefillResult(), self._wire.connector
        if connector is not None:
            result = connector.valid_result(self._pair, parse_fields(response))
        release_blocks(self._wire, now, self._decode, result, self._authorization)
        self._wire.remove_release(self)

    def response_begun(self, now: float, head: ResponseHead) -> None:  # noqa: ARG002
        """End: a refused prefill holds no blocks."""
        self._leg.drop()
        self._wire.remove_release(self)

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        """Ignore the body."""

    def connection_failed(self, now: float, error: WorkerError) -> None:  # noqa: ARG002
        """End; a response that had begun leaves blocks to expire."""
        if self._leg.is_answering:
            self._wire.metrics.handovers.count_end(LEFT_TO_EXPIRE)
        self._wire.remove_release(self)

    def expire(self, now: float) -> None:  # noqa: ARG002
        """Cancel the prefill unless its response has begun."""
        if self._leg.is_answering:
            self.deadline = inf  # the connection's deadline remains
            return
        self._leg.drop()
        self._wire.remove_release(self)


def other_decode_workers(wire: WireContext, decode: Worker) -> list[Worker]:
    return [
        worker
        for worker in wire.router.fleet.roster.workers_of(decode.model)
        if worker.role is Role.DECODE
        and worker is not decode
        and worker.up
        and not worker.is_barred
    ]


def parse_fields(response: bytes) -> dict[str, Any]:
    """Return the fields of a prefill response; empty if invalid."""
    try:
        fields = orjson.loads(response)
    except orjson.JSONDecodeError:
        return {}
    return fields if type(fields) is dict else {}


def release_blocks(
    wire: WireContext,
    now: float,
    decode: Worker,
    result: PrefillResult,
    authorization: bytes,
    *,
    healthy: bool = True,
) -> None:
    """Free the blocks through this decode worker; if it is not healthy, through another."""
    body = wire.connector.release(result) if wire.connector is not None else None
    if body is None:
        if result.params is not None:
            wire.metrics.handovers.count_end(LEFT_TO_EXPIRE)
        return
    block_release = BlockRelease(wire, body, authorization)
    if healthy:
        block_release.send(now, decode)
    else:
        block_release.send_elsewhere(now, decode)

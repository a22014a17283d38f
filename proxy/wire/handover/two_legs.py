"""The two legs of a hand-over, and the KV blocks between them.

A `TwoLegExchange` exists until the request is retried or ends. The result of the prefill serves one
decode leg; otherwise its blocks are released.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from math import inf
from typing import Any

from proxy.core.fleet.kv_links import ANY_DECODE, BARRED_S
from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Outcome
from proxy.core.routing.handover_cost import is_healthy
from proxy.http.request import Request
from proxy.metrics.handovers import ANY
from proxy.transfer.legs import IDS, decode_body, prefill_body
from proxy.transfer.types import Pair, PrefillResult, usage_of
from proxy.wire.context import WireContext
from proxy.wire.handover import first_token
from proxy.wire.handover.prefill_leg import PrefillLeg, PrefillOwner
from proxy.wire.handover.release import (
    LEFT_TO_EXPIRE,
    AbandonedPrefill,
    other_decode_workers,
    parse_fields,
    release_blocks,
)
from proxy.wire.timeouts import decode_timeout_s, prefill_timeout_s, response_timeout_s
from proxy.wire.worker.connection import ResponseReceiver, WorkerConnection, WorkerError
from proxy.wire.worker.request_bytes import to_worker

logger = logging.getLogger(__name__)

# Why a request is served whole.
FAILED_TRANSFER, REFUSED_PREFILL = "failed_transfer", "refused_prefill"
LATE_TRANSFER = "late_transfer"
NEARLY_DONE_S = 0.25
# Perhaps due to one worker's key, adapters or routes.
WORKER_SPECIFIC = frozenset([401, 403, 404, 405])


class TwoLegExchange:
    __slots__ = (
        "_connector", "_is_sent", "_lease", "_opening", "_pair", "_prefill_leg", "_prefill_worker",
        "_refused_status", "_request", "_unfetched", "_was_late", "_wire", "is_suspect", "late_at",
    )  # fmt: skip

    def __init__(
        self, wire: WireContext, request: Request, lease: Lease, prefill_worker: Worker
    ) -> None:
        if wire.connector is None:
            raise RuntimeError("a hand-over needs a connector")
        self._wire, self._connector = wire, wire.connector
        self._request = request
        self._lease, self._prefill_worker = lease, prefill_worker
        number = wire.new_id().decode()
        if lease.info.route in IDS:  # stored under this id: make it hard to guess
            number += os.urandom(8).hex()
        self._pair = Pair(
            wire.pools.pool_for(prefill_worker).side, wire.pools.pool_for(lease.worker).side, number
        )
        self._prefill_leg: PrefillLeg | None = None
        self._unfetched: PrefillResult | None = None  # not fetched by the decode worker
        self._opening = b""  # events held back
        self._is_sent = False  # the decode leg
        self.late_at = inf  # when the blocks may be reused
        self._was_late = False
        self._refused_status = 0  # of a refused prefill
        self.is_suspect = False  # `record_failure` applies

    # The legs

    def prefill(self, now: float, exchange: PrefillOwner, body: bytes) -> None:
        wire, lease, request = self._wire, self._lease, self._request
        pool = wire.pools.pool_for(self._prefill_worker)
        body = prefill_body(self._connector, self._pair, lease.info, body)
        settings = wire.settings
        within_s = prefill_timeout_s(lease, settings.prefill_s, settings.first_byte_s)
        leg = self._prefill_leg = PrefillLeg(exchange, within_s)
        pool.send(now, leg, to_worker(request, pool, body, self._id, plain=True))

    def decode(self, now: float, exchange: ResponseReceiver, response: bytes) -> bool:
        """Send the decode leg; False if no healthy worker is left."""
        wire, lease, request, connector = self._wire, self._lease, self._request, self._connector
        leg, self._prefill_leg = self._prefill_leg, None
        fields = parse_fields(response)
        result = self._unfetched = connector.valid_result(self._pair, fields)
        self._end_prefill(now, fields, result)
        holds = result.params is not None
        # The blocks have been held since the response began.
        spent_s = now - leg.begun_at if holds and leg is not None else 0.0
        may_move = not connector.names_decode
        if not wire.router.leases.recheck_decode_worker(
            lease, now, may_move=may_move, spent_s=spent_s
        ):
            return False
        pool = wire.pools.pool_for(lease.worker)
        self._pair = self._pair._replace(decode=pool.side)
        late_s = decode_timeout_s(lease, connector.read_within_s if holds else inf) - spent_s
        exchange.timeout_s = min(late_s, response_timeout_s(lease, wire.settings.first_byte_s))
        self.late_at = now + late_s
        self._is_sent = True
        body = decode_body(connector, self._pair, result, lease.info, request.body)
        pool.send(now, exchange, to_worker(request, pool, body, self._id))
        return True

    def _end_prefill(self, now: float, fields: dict[str, Any], result: PrefillResult) -> None:
        """Release the prefill worker, and count its response."""
        wire, lease, handover = self._wire, self._lease, self._lease.decision.handover
        learns = handover is not None and handover.cached_tokens > 0
        lacks_params = self._connector.needs_params and result.params is None
        if lacks_params and handover is not None:
            handover.tokens = 0  # nothing to transfer
        wire.metrics.handovers.count_prefill(lease, now, without_params=lacks_params)
        wire.router.leases.end_prefill(lease, now, usage_of(fields) if learns else None)
        if lacks_params:
            self._count_link_failure(now, ANY_DECODE)
        else:
            wire.router.placer.links.record_success(self._prefill_worker, ANY_DECODE)

    @property
    def _id(self) -> bytes:
        return self._connector.request_id(self._pair) or self._request.id

    @property
    def is_prefilling(self) -> bool:
        return self._prefill_leg is not None

    @property
    def is_free(self) -> bool:
        """True if a retry is free: no decode leg was sent, or its transfer was late.

        After a late transfer the request is served whole, so this happens once.
        """
        return not self._is_sent or self._was_late

    @property
    def prefill_connection(self) -> WorkerConnection | None:
        return None if self._prefill_leg is None else self._prefill_leg.connection

    @property
    def is_answering(self) -> bool:
        """True if the prefill leg's response has begun."""
        return self._prefill_leg is not None and self._prefill_leg.is_answering

    # The decode worker's response

    @property
    def is_fetch_pending(self) -> bool:
        """True until the blocks are known to be fetched."""
        return self._unfetched is not None

    @property
    def cached_tokens(self) -> int | None:
        """The cached tokens for the client's usage."""
        return None if self._unfetched is None else self._unfetched.cached_tokens

    def first_pieces(
        self, body: bytes, ended: bool, connection: WorkerConnection | None
    ) -> bytes | None:
        """Return the first pieces of a response; None until they show a transfer's result."""
        opening = self._opening = self._opening + body
        if (
            not ended
            and len(opening) <= first_token.MAX_OPENING_BYTES
            and first_token.find_result(opening) < 0
        ):
            if connection is not None:
                connection.deadline = min(connection.deadline, self.late_at)
            return None
        self._opening = b""
        return opening

    def record_fetched(self) -> None:
        if self._unfetched is not None:
            self._wire.router.placer.links.record_success(self._prefill_worker, self._lease.worker)
            self._unfetched = None

    # Failures

    def handle_refused_prefill(self, now: float, status: int) -> None:
        """Handle a refused prefill: try another prefill worker once, or serve the request whole."""
        self._refused_status = status
        leases, lease = self._wire.router.leases, self._lease
        may_try_other = status in WORKER_SPECIFIC and not lease.attempts.tried
        if not (may_try_other and leases.has_other_prefill(lease, now)):
            lease.attempts = replace(lease.attempts, why_whole=REFUSED_PREFILL)

    def end_failed(
        self, now: float, outcome: Outcome, error: WorkerError
    ) -> tuple[Worker, Outcome]:
        """End the hand-over; return the worker to avoid and its outcome."""
        lease, was_sent = self._lease, self._is_sent
        if self.is_answering:  # the missing part would locate the held blocks
            self._wire.metrics.handovers.count_end(LEFT_TO_EXPIRE)
        self._prefill_leg = None
        late = error is WorkerError.TIMEOUT and now >= self.late_at
        if late:
            self._wire.metrics.handovers.count_end("late_failed")
        else:
            self._wire.metrics.count_failed_handover(lease, sent_to_decode=was_sent)
        if self._unfetched is None:
            self.is_suspect = bool(self._refused_status)
            return lease.running_leg.worker, outcome
        healthy = error is WorkerError.STATUS if was_sent else is_healthy(lease)
        self.release_unfetched(now, healthy=healthy)
        is_decode_worker_well = (late or outcome is Outcome.ERRED) if was_sent else healthy
        if not is_decode_worker_well:
            return lease.worker, outcome
        return self._end_transfer(now, late=late), Outcome.MOOT

    def _end_transfer(self, now: float, *, late: bool) -> Worker:
        """Have the request served whole; return the worker to avoid."""
        lease, self._was_late = self._lease, late
        if late:
            self._count_link_failure(now, lease.worker)
        # A transfer that failed at once does not rule out its decode worker.
        self.is_suspect = self._is_sent and not late
        whole = FAILED_TRANSFER if self.is_suspect else LATE_TRANSFER
        lease.attempts = replace(lease.attempts, why_whole=whole)
        if not self.is_suspect and self._wire.router.leases.has_other_worker(lease):
            return lease.worker
        return self._prefill_worker

    def record_failure(self, now: float) -> None:
        """Count the failure, after the request succeeded elsewhere."""
        decode = ANY_DECODE if self._refused_status else self._lease.worker
        self._count_link_failure(now, decode)

    def _count_link_failure(self, now: float, decode: Worker | None) -> None:
        prefill, wire = self._prefill_worker, self._wire
        if not wire.router.placer.links.record_failure(prefill, decode, now):
            return
        decode_name = ANY if decode is None else decode.name
        wire.metrics.handovers.count_barred(prefill.name, decode_name)
        if self._refused_status:
            logger.warning(
                "%s refuses prefills that other workers serve, the last with status %d; it gets no "
                "prefills for %g s. Check its key, adapters and flags.",
                prefill.name,
                self._refused_status,
                BARRED_S,
            )
        elif decode is None:
            logger.warning(
                "%s returns prefills without transfer parameters, so prompts are prefilled twice; "
                "it gets no prefills for %g s. Check that it runs with the %s connector.",
                prefill.name,
                BARRED_S,
                self._connector.name,
            )
        else:
            logger.warning(
                "transfers from %s to %s fail or are late; the router makes none for %g s",
                prefill.name,
                decode.name,
                BARRED_S,
            )

    def stop(self, now: float, connection: WorkerConnection | None) -> None:
        """Stop both legs; the connection is the decode leg's."""
        if self._prefill_leg is not None:
            self._abandon(now, self._prefill_leg)
            self._prefill_leg = None
        if connection is not None:
            sent, healthy = connection.has_sent, connection.is_open
            connection.drop()
            if not sent:
                # A worker may be healthy before its connection is open.
                self.release_unfetched(
                    now, healthy=healthy or not other_decode_workers(self._wire, self._lease.worker)
                )
        else:
            self.release_unfetched(now, healthy=True)

    def _abandon(self, now: float, leg: PrefillLeg) -> None:
        """Cancel the prefill, or await a nearly complete one to release its blocks."""
        if leg.is_answering or (leg.is_sent and is_nearly_done(self._lease, now)):
            authorization = self._request.head.authorization
            decode = self._lease.worker
            abandoned = AbandonedPrefill(self._wire, self._pair, decode, authorization, leg)
            abandoned.adopt(now)
        else:
            leg.drop()

    def release_unfetched(self, now: float, *, healthy: bool) -> None:
        result, self._unfetched = self._unfetched, None
        if result is not None:
            authorization = self._request.head.authorization
            release_blocks(
                self._wire, now, self._lease.worker, result, authorization, healthy=healthy
            )


def is_nearly_done(lease: Lease, now: float) -> bool:
    """Return True if a prefill should end within `NEARLY_DONE_S` or is not predictable."""
    first, handover = lease.prefill, lease.decision.handover
    if first is None or handover is None or not first.worker.pace.prefills:
        return True
    return now > first.charged_at + handover.prefill_s - NEARLY_DONE_S

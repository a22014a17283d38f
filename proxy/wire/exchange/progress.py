"""Steps of a response: written, its tokens counted, ended or broken off."""

from __future__ import annotations

from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Outcome, Refusal
from proxy.core.request.client_fields import OPTIONS
from proxy.http.response_parser import OK, ResponseHead
from proxy.http.sse import EventStream
from proxy.wire.exchange.continuation import keep_for_continuation
from proxy.wire.exchange.owner import AttemptOwner
from proxy.wire.exchange.response_writer import (
    BodyEdits,
    ResponseWriter,
    response_id_in,
    usage_of,
)
from proxy.wire.exchange.state import ANSWERING
from proxy.wire.exchange.stream_fast_path import StreamCounter, StreamFastPath

BAD_REQUEST, BAD_GATEWAY = 400, 502


def writer_for(
    exchange: AttemptOwner, head: ResponseHead, cached_tokens: int | None = None
) -> ResponseWriter:
    request, info = exchange.request, exchange.info
    changed = None if info is None else info.edits
    return ResponseWriter(
        request,
        head,
        exchange.record.decision,
        keep_alive=request.head.keep_alive and not exchange.wire.leaving,
        edits=BodyEdits(
            cached_tokens=cached_tokens,
            hides_usage=changed is not None and OPTIONS in changed,
            holds_opening=may_hold_opening(exchange),
        ),
    )


def record_first_bytes(
    exchange: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter, data: bytes
) -> None:
    router = exchange.wire.router
    exchange.set_state(ANSWERING)
    if not keep_for_continuation(exchange, lease, response):
        exchange.forget_body()
    if lease is None or response.status != OK:
        return
    if exchange.suspect is not None:
        exchange.suspect.record_failure(now)
    if not lease.info.generates:
        router.leases.record_first_token(lease, now)
    elif lease.info.tenant is not None:
        router.leases.record_begin(lease, now)
    if exchange.route.stores and (response_id := response_id_in(data)):
        router.remember(response_id, lease.worker.name, lease.info.tenant)
        router.leases.record_response_id(lease, response_id, now)


def count_tokens(exchange: AttemptOwner, lease: Lease | None, now: float, tokens: int) -> None:
    record, wire = exchange.record, exchange.wire
    if lease is not None:
        if record.first_token_at is None:
            if lease.prefill is not None:
                wire.metrics.handovers.observe_transfer(lease, now)
            wire.router.leases.record_first_token(lease, now)
        wire.router.leases.record_tokens(lease, tokens)
    record.record_tokens(now, wire.metrics, tokens)


def fast_path(
    exchange: AttemptOwner, lease: Lease, response: ResponseWriter, stream: EventStream
) -> StreamFastPath:
    wire = exchange.wire
    return StreamFastPath(
        StreamCounter(wire.router.leases, lease, wire.metrics, exchange.record),
        stream,
        exchange.client.write,
        changes_usage=response.changes_usage,
        failures=() if exchange.sent_text is None else exchange.sent_text.failures,
    )


def may_hold_opening(exchange: AttemptOwner) -> bool:
    """Return whether the client does not need a response's id before its output."""
    info = exchange.info
    return exchange.route.stores and info is not None and not info.in_background


def may_pass_at_once(exchange: AttemptOwner, head: ResponseHead) -> bool:
    request_head = exchange.request.head
    return (
        head.length is not None
        and request_head.keep_alive
        and not exchange.wire.leaving
        and not request_head.explain
        and not request_head.http_1_0
        and exchange.suspect is None
        and not exchange.route.stores
    )


def pass_at_once(
    exchange: AttemptOwner, lease: Lease, now: float, head: ResponseHead, body: bytes
) -> None:
    """Pass on a response in one piece, and end the exchange."""
    wire, client = exchange.wire, exchange.client
    exchange.forget_body()
    data = b"%bX-Request-Id: %b\r\nContent-Length: %b\r\n\r\n%b" % (
        head.top, exchange.request.id, head.length or b"", body,
    )  # fmt: skip
    router = wire.router
    if not lease.info.generates:
        router.leases.record_first_token(lease, now)
    exchange.record.sent_bytes += len(data)
    usage = usage_of(head, body) if router.leases.wants_usage(lease, now) else None
    router.leases.finish(lease, now, Outcome.DONE, usage)
    client.write(data)  # last: after an error above, the retry's response must be the only one
    exchange.close(now, OK)
    client.end_response(now, keep_alive=True)
    wire.dispatch_queued(now)


def finish(
    exchange: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter
) -> None:
    wire, status = exchange.wire, response.status
    if lease is not None:
        succeeded = status < BAD_REQUEST
        if succeeded and lease.sent and lease.prefill and exchange.record.first_token_at is None:
            wire.metrics.handovers.count_transfer(lease)
        outcome = Outcome.DONE if succeeded else Outcome.REFUSED
        # Reading the usage costs 1-2 us.
        usage = response.usage() if wire.router.leases.wants_usage(lease, now) else None
        wire.router.leases.finish(lease, now, outcome, usage)
    exchange.close(now, status)
    exchange.client.end_response(now, keep_alive=response.keep_alive)
    wire.dispatch_queued(now)


def end_stream(
    exchange: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter, end: bytes
) -> None:
    """End a stream of which the client has all but these bytes."""
    exchange.record.sent_bytes += len(end)
    exchange.client.write(end)
    finish(exchange, lease, now, response)


def break_off(
    exchange: AttemptOwner,
    now: float,
    response: ResponseWriter,
    message: str,
    code: str,
    refusal: Refusal | None = None,
) -> None:
    """End an incomplete response so that the client notices; `refusal`: why, if known.

    After an error event and the end of the framing, the connection can be reused.
    """
    error_event = response.final_error_event(message, code)
    exchange.record.sent_bytes += len(error_event or b"")
    if refusal is None:
        exchange.close(now, BAD_GATEWAY)
    else:
        exchange.close(now, refusal.status, refusal.reason)
    if error_event is None:
        exchange.client.break_off()
    else:
        exchange.client.write(error_event)
        exchange.client.end_response(now, keep_alive=response.keep_alive)
    exchange.wire.dispatch_queued(now)

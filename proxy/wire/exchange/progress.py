"""Actions as a response passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.model.types import Outcome, Refusal
from proxy.core.request.client_fields import OPTIONS
from proxy.http.response_parser import OK
from proxy.wire.exchange.continuation import keep_for_continuation
from proxy.wire.exchange.response_writer import ResponseWriter, response_id_in, usage_of
from proxy.wire.exchange.state import ANSWERING
from proxy.wire.exchange.stream_fast_path import StreamFastPath

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Lease
    from proxy.http.response_parser import ResponseHead
    from proxy.http.sse import EventStream
    from proxy.wire.exchange.owner import AttemptOwner

BAD_REQUEST, BAD_GATEWAY = 400, 502


def writer_for(
    owner: AttemptOwner, head: ResponseHead, cached_tokens: int | None = None
) -> ResponseWriter:
    request, ask = owner.request, owner.ask
    changed = None if ask is None else ask.fields
    return ResponseWriter(
        request,
        head,
        owner.record.decision,
        keep_alive=request.head.keep_alive and not owner.wire.leaving,
        cached_tokens=cached_tokens,
        hides_usage=changed is not None and OPTIONS in changed,
    )


def record_first_bytes(
    owner: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter, data: bytes
) -> None:
    router = owner.wire.router
    owner.set_state(ANSWERING)
    if not keep_for_continuation(owner, lease, response):
        owner.forget_body()
    if lease is None or response.status != OK:
        return
    if owner.suspect is not None:
        owner.suspect.record_failure(now)
    if not lease.ask.generates:
        router.leases.record_first_token(lease, now)
    elif lease.ask.tenant is not None:
        router.leases.record_begin(lease, now)
    if owner.route.stores and (response_id := response_id_in(data)):
        router.remember(response_id, lease.worker.name, lease.ask.tenant)
        router.leases.record_response_id(lease, response_id, now)


def count_tokens(owner: AttemptOwner, lease: Lease | None, now: float, tokens: int) -> None:
    record, wire = owner.record, owner.wire
    if lease is not None:
        if record.first_token_at is None:
            if lease.prefill is not None:
                wire.metrics.handovers.observe_transfer(lease, now)
            wire.router.leases.record_first_token(lease, now)
        wire.router.leases.record_tokens(lease, tokens)
    record.record_tokens(now, wire.metrics, tokens)


def fast_path(
    owner: AttemptOwner, lease: Lease, response: ResponseWriter, stream: EventStream
) -> StreamFastPath:
    return StreamFastPath(
        owner.wire.router,
        lease,
        owner.wire.metrics,
        owner.record,
        stream,
        owner.client.write,
        recounts=response.changes_usage,
        failures=() if owner.sent_text is None else owner.sent_text.failures,
    )


def may_pass_at_once(owner: AttemptOwner, head: ResponseHead) -> bool:
    request_head = owner.request.head
    return (
        head.length is not None
        and request_head.keep_alive
        and not owner.wire.leaving
        and not request_head.explain
        and not request_head.http_1_0
        and owner.suspect is None
        and not owner.route.stores
    )


def pass_at_once(
    owner: AttemptOwner, lease: Lease, now: float, head: ResponseHead, body: bytes
) -> None:
    """Pass on a response in one piece, and end the exchange."""
    wire, client = owner.wire, owner.client
    owner.forget_body()
    data = b"%bX-Request-Id: %b\r\nContent-Length: %b\r\n\r\n%b" % (
        head.top, owner.request.id, head.length or b"", body,
    )  # fmt: skip
    router = wire.router
    if not lease.ask.generates:
        router.leases.record_first_token(lease, now)
    owner.record.sent_bytes += len(data)
    usage = usage_of(head, body) if router.leases.wants_usage(lease, now) else None
    router.leases.finish(lease, now, Outcome.DONE, usage)
    client.write(data)  # last: after an error above, the retry's response must be the only one
    owner.close(now, OK)
    client.end_response(now, keep_alive=True)
    wire.dispatch_queued(now)


def finish(owner: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter) -> None:
    wire, status = owner.wire, response.status
    if lease is not None:
        done = status < BAD_REQUEST
        if done and lease.sent and lease.prefill and owner.record.first_token_at is None:
            wire.metrics.handovers.count_transfer(lease)
        outcome = Outcome.DONE if done else Outcome.REFUSED
        # Reading the usage costs 1-2 us.
        usage = response.usage() if wire.router.leases.wants_usage(lease, now) else None
        wire.router.leases.finish(lease, now, outcome, usage)
    owner.close(now, status)
    owner.client.end_response(now, keep_alive=response.keep_alive)
    wire.dispatch_queued(now)


def end_stream(
    owner: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter, end: bytes
) -> None:
    """End a stream of which the client has all but these bytes."""
    owner.record.sent_bytes += len(end)
    owner.client.write(end)
    finish(owner, lease, now, response)


def break_off(
    owner: AttemptOwner,
    now: float,
    response: ResponseWriter,
    message: str,
    code: str,
    refusal: Refusal | None = None,
) -> None:
    """End an incomplete response so that the client notices; `refusal`: why, if known.

    After an error event and the end of the framing, the connection can be reused.
    """
    last_words = response.final_error_event(message, code)
    owner.record.sent_bytes += len(last_words or b"")
    if refusal is None:
        owner.close(now, BAD_GATEWAY)
    else:
        owner.close(now, refusal.status, refusal.reason)
    if last_words is None:
        owner.client.break_off()
    else:
        owner.client.write(last_words)
        owner.client.end_response(now, keep_alive=response.keep_alive)
    owner.wire.dispatch_queued(now)

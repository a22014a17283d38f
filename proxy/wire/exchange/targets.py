"""The deadline in a client's header, and what is left of it for the worker.

Both are durations: no clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import orjson

from proxy.core.model.refusals import bad_request
from proxy.core.model.types import ReceivedRequest, Refusal, RequestInfo
from proxy.core.queue.latency_admission import NO_TARGETS
from proxy.core.request.json_body import LargeBody
from proxy.core.request.json_edit import edit_members
from proxy.core.request.response_owners import UnknownOwnerError
from proxy.core.request.session_key import id_in_headers
from proxy.wire.exchange.owner import AttemptOwner
from proxy.wire.settings import WireSettings

HEADER, HEADER_NAME = b"x-request-deadline-ms", "X-Request-Deadline-Ms"
MAX_MS, MAX_DIGITS = 3_600_000, 7
ARGUMENTS = "vllm_xargs"
NO_NAMES: frozenset[str] = frozenset()


def deadline_in(
    headers: Mapping[bytes, bytes], now: float, settings: WireSettings
) -> float | Refusal:
    value = headers.get(HEADER)
    if value is None or not settings.client_deadlines:
        return inf
    digits = value.strip()
    if len(digits) <= MAX_DIGITS and digits.isdigit() and 1 <= int(digits) <= MAX_MS:
        return now + int(digits) / 1000
    shown = value[:40].decode("latin-1")
    return bad_request(
        f"{HEADER_NAME}: {shown!r} is not a whole number of milliseconds from 1 to {MAX_MS}. It is "
        "the time until the first token, counted from the request's arrival.",
        HEADER_NAME,
    )


def read_request(
    exchange: AttemptOwner, now: float, large: LargeBody | None, *, may_wait: bool
) -> RequestInfo | Refusal | None:
    """Read a request; None if it has to wait for the owner of a stored response."""
    router, request = exchange.wire.router, exchange.request
    head, special = request.head, request.head.special
    deadline = deadline_in(special, exchange.record.started, exchange.wire.settings)
    if isinstance(deadline, Refusal):
        info: RequestInfo | Refusal = router.placer.count_refusal("", deadline)
    else:
        received = ReceivedRequest(
            exchange.route, request.body, special.get(b"content-type", b""),
            request.id.decode("latin-1"), head.tenant, id_in_headers(special),
            batch=head.batch, deadline=deadline, explain=head.explain, large=large,
            may_wait=may_wait,
        )  # fmt: skip
        try:
            info = router.read(received)
        except UnknownOwnerError:
            return None
    if isinstance(info, Refusal):
        router.charge_refused_read(head.tenant, now)
    return info


def body_with_targets(exchange: AttemptOwner, now: float) -> bytes:
    info, body = exchange.info, exchange.request.body
    if not exchange.wire.settings.pass_targets or info is None or not info.takes_arguments:
        return body
    if exchange.begun_response is not None:  # has a token
        return body
    targets = targets_left_ms(exchange, info, now)
    return edit_members(body, {ARGUMENTS: orjson.dumps(targets)}, NO_NAMES) if targets else body


def targets_left_ms(exchange: AttemptOwner, info: RequestInfo, now: float) -> dict[str, int]:
    """Return the targets in milliseconds.

    Engines know no tenants, so a tenant's deadline may only relax the operator's target.
    """
    settings = exchange.wire.router.settings.admission or NO_TARGETS
    ttft_s, tpot_s = settings.ttft_of(info), settings.tpot_of(info)
    due = inf if ttft_s is None else exchange.record.started + ttft_s
    if info.deadline < inf:
        due = info.deadline if info.tenant is None else max(due, info.deadline)
    left_ms: dict[str, int] = {}
    if due < inf and (info.tenant is None or ttft_s is not None):
        left_ms["deadline_ms"] = round((due - now) * 1000)
    if tpot_s is not None:
        left_ms["tpot_ms"] = max(round(tpot_s * 1000), 1)
    return left_ms

"""Responses that the router writes itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

from proxy.core.fleet.leases import Decision
from proxy.core.model.specs import Score
from proxy.core.model.types import NONE, Reason, Refusal
from proxy.http.error_formats import error_for
from proxy.http.headers import JSON, status_line
from proxy.http.request import Request


def route_header(worker: str, reason: Reason, scores: Iterable[Score]) -> bytes:
    """Return an X-Route value: `s0; reason=short_pool; s0=0.0120; l0=0.2500 (busy)`."""
    parts = [worker, f"reason={reason}"]
    for score in scores:
        note = f" ({score.note})" if score.note else ""
        parts.append(f"{score.worker}={score.total:z.4f}{note}")  # `z`: no negative zero
    return "; ".join(parts).encode("ascii", "replace")


def decision_header(decision: Decision) -> bytes:
    """Return the X-Route value of a decision.

    A hand-over reads `d0; prefill=p0; ...`, a rejected one `d0; handover=not_worth_it; ...`, a
    session's turn `s0; session=stayed; ...`.
    """
    name, handover = decision.worker.name, decision.handover
    if handover is not None:
        name = f"{name}; prefill={handover.prefill.name}"
    elif decision.verdict:
        name = f"{name}; handover={decision.verdict}"
    if decision.turn:
        name = f"{name}; session={decision.turn}"
    return route_header(name, decision.reason, decision.scores)


def respond(
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    keep_alive: bool = True,
    bodiless: bool = False,
) -> bytes:
    """Return a response; `bodiless` omits the body, for HEAD."""
    pieces = [status_line(status)]
    for name, value in headers:
        pieces += (name, b": ", value, b"\r\n")
    if body:
        pieces += (b"Content-Type: ", content_type, b"\r\n")
    # HTTP/1.0 needs keep-alive, HTTP/1.1 needs close.
    pieces.append(b"Connection: keep-alive\r\n" if keep_alive else b"Connection: close\r\n")
    pieces.append(b"Content-Length: %d\r\n\r\n" % len(body))
    if not bodiless:
        pieces.append(body)
    return b"".join(pieces)


def refuse(
    refusal: Refusal,
    request: Request | None,
    *,
    keep_alive: bool = True,
    request_id: bytes = b"",
    path: str = "",
) -> bytes:
    """Return an error response; `request_id` and `path` replace an unparsed request."""
    headers: list[tuple[bytes, bytes]] = []
    bodiless = False
    if known_as := request.id if request is not None else request_id:
        headers.append((b"X-Request-Id", known_as))
    if request is not None:
        bodiless, path = request.head.method == "HEAD", request.head.path
        if request.head.explain:
            headers.append((b"X-Route", route_header(NONE, refusal.reason, refusal.scores)))
    if refusal.retry_after_s is not None:
        headers.append((b"Retry-After", b"%d" % max(1, math.ceil(refusal.retry_after_s))))
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers]
    body = error_for(path, refusal, known_as)
    return respond(refusal.status, body, headers=headers, keep_alive=keep_alive, bodiless=bodiless)

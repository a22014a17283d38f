"""Records of finished requests."""

from __future__ import annotations

from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.types import Reason


def finished(
    route: str = "chat/completions",
    status: int = 200,
    reason: Reason = Reason.GENERAL_POOL,
    duration_s: float = 1.0,
    **more: object,
) -> FinishedRequest:
    done = FinishedRequest(route, status, reason, duration_s)
    for name, value in more.items():
        setattr(done, name, value)
    return done

"""Deadlines for the arrival of a request."""

from __future__ import annotations

from math import inf

from proxy.core.model import refusals
from proxy.core.model.types import Reason, Refusal
from proxy.wire.settings import WireSettings


class UploadDeadline:
    __slots__ = ("_body_at", "_body_bytes", "_came_at")

    def __init__(self) -> None:
        self._came_at = inf  # first byte of the head
        self._body_at = inf  # first byte of the body
        self._body_bytes = 0  # received since then

    def record_bytes(self, size: int) -> None:
        self._body_bytes += size

    def reset(self) -> None:
        self._came_at = self._body_at = inf

    def finish(self, now: float) -> float:
        """Return when the request arrived, and reset."""
        arrived_at = min(self._came_at, now)
        self.reset()
        return arrived_at

    def due(self, now: float, settings: WireSettings, *, in_body: bool, body_begins: bool) -> float:
        """Return the deadline for the rest of the request."""
        self._came_at = min(self._came_at, now)
        request_s = settings.request_s
        due = inf if request_s is None else self._came_at + request_s
        if body_begins:
            self._body_at, self._body_bytes = now, 0
        return min(due, self._body_due(settings)) if in_body else due

    def too_late(self, now: float, settings: WireSettings) -> Refusal:
        request_s = settings.request_s
        if request_s is not None and now > self._came_at + request_s:
            return refusals.request_late(request_s)
        if now > self._body_due(settings):
            return refusals.slow_body(settings.body_min_bytes_per_s)
        return Refusal(408, Reason.BAD_REQUEST, "the request took too long to arrive")

    def _body_due(self, settings: WireSettings) -> float:
        min_rate = settings.body_min_bytes_per_s
        if not min_rate:
            return inf
        return self._body_at + settings.client_idle_s + self._body_bytes / min_rate

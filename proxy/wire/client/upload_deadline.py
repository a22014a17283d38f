"""How long the rest of a request may take to arrive: what has come of it, and since when."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from proxy.core.model import refusals
from proxy.core.model.types import Reason, Refusal

if TYPE_CHECKING:
    from proxy.wire.settings import WireSettings


class UploadDeadline:
    """The request that a connection is reading."""

    __slots__ = ("_body_at", "_body_bytes", "_came_at")

    def __init__(self) -> None:
        self._came_at = inf  # the first byte of its head; inf between two requests
        self._body_at = inf  # the first byte of its body
        self._body_bytes = 0  # that have come since then

    def got(self, size: int) -> None:
        """Count bytes that came while no other request was being answered."""
        self._body_bytes += size

    def reset(self) -> None:
        """Begin anew with the next request."""
        self._came_at = self._body_at = inf

    def ended(self, now: float) -> float:
        """Return when the request that is answered now came, and begin anew."""
        came_at = min(self._came_at, now)
        self.reset()
        return came_at

    def due(self, now: float, settings: WireSettings, *, in_body: bool, body_begins: bool) -> float:
        """Return when the rest of the request has to be there; inf where nothing says so."""
        self._came_at = min(self._came_at, now)
        request_s = settings.request_s
        due = inf if request_s is None else self._came_at + request_s
        if body_begins:
            self._body_at, self._body_bytes = now, 0
        return min(due, self._body_due(settings)) if in_body else due

    def too_late(self, now: float, settings: WireSettings) -> Refusal:
        """Return the refusal for a request that has passed a deadline."""
        request_s = settings.request_s
        if request_s is not None and now > self._came_at + request_s:
            return refusals.request_late(request_s)
        if now > self._body_due(settings):
            return refusals.slow_body(settings.body_min_bytes_per_s)
        return Refusal(408, Reason.BAD_REQUEST, "the request took too long to come")

    def _body_due(self, settings: WireSettings) -> float:
        """Return until when what has come of a body suffices, at the least rate."""
        least = settings.body_min_bytes_per_s
        if not least:
            return inf
        return self._body_at + settings.client_idle_s + self._body_bytes / least

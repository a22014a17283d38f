"""One connection to the admin port: uvicorn's, with deadlines that uvicorn does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

PATIENCE_S = 10.0  # for a request to come whole, and for a client to take what it is sent


class AdminConnection(H11Protocol):
    """Closes when its client is slow. uvicorn closes connections that are idle after an answer."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.when_lost: Callable[[AdminConnection, None], object] = _forget
        self._request_due: asyncio.TimerHandle | None = None
        self._taken_by: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether the next request, or its body, has yet to come."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def abort(self) -> None:
        """Close now."""
        if self.transport is not None:  # there is none before the end of a TLS handshake
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its time."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read requests."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Give the next request its time."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Give the client its time to take what it was sent."""
        super().pause_writing()
        self._taken_by = self.loop.call_later(PATIENCE_S, self.abort)

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        _cancel(self._taken_by)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        super().connection_lost(exc)
        _cancel(self._request_due)
        _cancel(self._taken_by)
        self.when_lost(self, None)

    def _watch(self) -> None:
        """Keep one deadline for as long as a request is not whole, however its bytes trickle in."""
        if not self.waits or self.transport.is_closing():
            _cancel(self._request_due)
            self._request_due = None
        elif self._request_due is None:
            self._request_due = self.loop.call_later(PATIENCE_S, self.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _forget(_: AdminConnection, __: None) -> None:
    """Do nothing."""

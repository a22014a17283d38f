"""A connection to the admin port: uvicorn's protocol with additional timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

TIMEOUT_S = 10.0  # to receive a whole request, and for the client to read what was sent


class AdminConnection(H11Protocol):
    """Closes when the client is slow; uvicorn only times out idle connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.when_lost: Callable[[AdminConnection, None], object] = lambda *_: None
        self._request_timeout: asyncio.TimerHandle | None = None
        self._write_timeout: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """True while the next request or its body is incomplete."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def abort(self) -> None:
        if self.transport is not None:  # None before the end of a TLS handshake
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the first request's timeout."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Start the next request's timeout."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start the timeout for the client to read."""
        super().pause_writing()
        self._write_timeout = self.loop.call_later(TIMEOUT_S, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._request_timeout)
        _cancel(self._write_timeout)
        self.when_lost(self, None)

    def _watch(self) -> None:
        """Keep one timeout from the first byte that is awaited to the end of the request."""
        if not self.waits or self.transport.is_closing():
            _cancel(self._request_timeout)
            self._request_timeout = None
        elif self._request_timeout is None:
            self._request_timeout = self.loop.call_later(TIMEOUT_S, self.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

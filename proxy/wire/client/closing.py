"""How long a closing connection may deliver its last bytes."""

from __future__ import annotations

import asyncio
from math import inf

from proxy.wire.sockets import unacknowledged


class Closing:
    __slots__ = ("_close_by", "_unsent")

    def __init__(self) -> None:
        self._close_by = -inf
        self._unsent = True  # at the last check

    def begin(self, close_by: float) -> None:
        self._close_by = close_by

    def has_undelivered(self, now: float, transport: asyncio.Transport) -> bool:
        """Return True if there may be undelivered bytes.

        A TLS client may never confirm the close. Two checks are needed: the event loop may write in
        between.
        """
        if now >= self._close_by:
            return False
        before, self._unsent = self._unsent, unacknowledged(transport) != 0
        return before or self._unsent

"""Reads a snapshot in parts: as a whole it may stop the event loop for 50 ms."""

from __future__ import annotations

from array import array
from math import inf
from typing import Final

from proxy.journal.messages import Position, decode_row, decode_snapshot

TOKEN_TYPE: Final = "I"  # noqa: S105 - of an array


class JournalRequest:
    """A request in an engine's journal; `request_id` is the engine's own id."""

    __slots__ = (
        "complete", "ended_at", "name", "prompt_tokens", "request_id", "resident", "running",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, request_id: str, prompt_tokens: int, resident: int = 0, *, running: bool = True
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.name = b""
        self.resident = resident
        self.running = running
        self.ended_at = 0.0
        self.complete = running  # `tokens` has every output token
        self.tokens: array[int] = array(TOKEN_TYPE)

    def extend(self, tokens: list[int], limit: int) -> None:
        """Add output tokens; drop all of them above the limit."""
        if self.complete:
            self.tokens.extend(tokens)
            if len(self.tokens) > limit:
                self.drop_tokens()

    def without_last_token(self) -> JournalRequest:
        copy = JournalRequest(self.request_id, self.prompt_tokens, running=False)
        copy.complete, copy.ended_at = True, self.ended_at
        copy.tokens = self.tokens[:-1]
        return copy

    def drop_tokens(self) -> None:
        self.complete = False
        self.tokens = array(TOKEN_TYPE)


class SnapshotReader:
    """The requests of one snapshot, by the engine's numbers."""

    def __init__(self, position: Position, payload: bytes, max_tokens: int) -> None:
        snapshot = decode_snapshot(payload)
        self.position = position
        self.block_tokens = snapshot.block_tokens
        self.requests: dict[int, JournalRequest] = {}
        self._rows = iter(snapshot.requests)
        self._max_tokens = max_tokens

    def read(self, max_bytes: float = inf) -> bool:
        """Read the next requests; return whether all are read."""
        for row in self._rows:
            decoded = decode_row(row)
            request = self.requests[decoded.number] = JournalRequest(
                decoded.id, decoded.prompt_tokens, decoded.resident, running=decoded.running
            )
            request.name = decoded.name
            request.extend(decoded.tokens, self._max_tokens)
            max_bytes -= memoryview(row).nbytes
            if max_bytes <= 0:
                return False
        return True

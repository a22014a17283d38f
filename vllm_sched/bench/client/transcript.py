"""A conversation as JSON text for request bodies, which grows by each turn."""

from __future__ import annotations

import json
from typing import Self


class Transcript:
    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._parts: list[str] = []

    def restart(self, text: str) -> None:
        """Begin anew with a user's text."""
        self._parts = []
        self.extend("user", text)

    def extend(self, role: str, text: str) -> None:
        """Append a message; without chat, its text."""
        escaped = json.dumps(text)
        self._parts.append(
            f'{{"role":"{role}","content":{escaped}}}' if self._chat else escaped[1:-1]
        )

    def copy(self) -> Self:
        made = type(self)(chat=self._chat)
        made._parts = self._parts.copy()
        return made

    def field(self) -> str:
        """Return the field of the request body."""
        if self._chat:
            return f'"messages":[{",".join(self._parts)}]'
        return f'"prompt":"{" ".join(self._parts)}"'

"""Error texts of endpoints, shortened to one line for a table."""

from __future__ import annotations

MAX_EXCERPT_CHARACTERS = 300


def excerpt(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return " ".join(text.split())[:MAX_EXCERPT_CHARACTERS]

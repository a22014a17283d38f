"""What an endpoint said, in one line that fits into a table."""

from __future__ import annotations

LENGTH = 300


def excerpt(text: str | bytes) -> str:
    """Make one short line of an error's words."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return " ".join(text.split())[:LENGTH]

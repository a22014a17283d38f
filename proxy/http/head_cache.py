"""Heads that equal an earlier one except for Content-Length: comparing is cheaper than parsing."""

from __future__ import annotations

CONTENT_LENGTH = b"\r\ncontent-length:"
MAX_DIGITS = 18


class HeadPattern:
    """The bytes around the digits of Content-Length."""

    __slots__ = ("_after", "_before", "_size")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._size = len(before) + len(after)

    def digits_in(self, data: bytes) -> bytes:
        """Return the digits if `data` starts with this head, else nothing."""
        before = self._before
        if not data.startswith(before):
            return b""
        at = len(before)
        end = data.find(b"\r", at, at + MAX_DIGITS)
        if end < 0:  # the head may be incomplete
            return b""
        digits = data[at:end]
        return digits if digits.isdigit() and data.startswith(self._after, end) else b""

    def size(self, digits: bytes) -> int:
        """Return the length of the head with these digits."""
        return self._size + len(digits)


def learn_head(data: bytes, length: bytes) -> HeadPattern | None:
    end = data.find(b"\r\n\r\n") + 4
    at = data[:end].lower().find(CONTENT_LENGTH)
    if at < 0 or not length.isdigit():
        return None
    at = data.find(length, at + len(CONTENT_LENGTH))
    return HeadPattern(data[:at], data[at + len(length) : end])

"""Finds the first event of a stream that shows whether the KV transfer worked.

vLLM sends opening events before the engine starts: a chat role, or events such as
`response.created`. Only the first text or error shows the result.
"""

from __future__ import annotations

import re

MOST = 1 << 20  # bytes; opening events may repeat the instructions
STARTS = (b"d", b"e", b":")  # data, event, comment
END = re.compile(rb"\n\r?\n")
ROLE = re.compile(rb'data: [^\n]*"role": ?"assistant", ?"content": ?(?:""|null)')
# Text, an end or an error.
TELLS = re.compile(rb"event: ?\S*(?:delta|done|stop|completed|incomplete|failed|error)")
# Cohere's events have no names; vLLM writes the type last.
COHERE = re.compile(rb'data: ?\{[^\n]*"type": ?"message-start"')
FAILED = re.compile(
    rb'event: ?(?:error|response\.failed)\r?\n|data: ?\{"(?:error"|type": ?"error")'
    rb'|data: ?\{"type": ?"message-end"[^\n]*"error"'
)


def after(text: bytes) -> int:
    """Return the offset of the first event after the opening; -1 if none."""
    at = 0
    if not text.startswith(STARTS):
        return 0  # not an event stream
    while (end := END.search(text, at)) is not None:
        if not _is_quiet(text, at, end.start()):
            return at
        at = end.end()
    return -1


def _is_quiet(text: bytes, at: int, end: int) -> bool:
    if text.startswith(b"event:", at):
        return TELLS.match(text, at, end) is None
    if text.startswith(b":", at):
        return True
    return any(says.match(text, at, end) for says in (ROLE, COHERE))


def says_failed(text: bytes) -> bool:
    """Return True if the first event after the opening is an error."""
    return FAILED.match(text, max(after(text), 0)) is not None

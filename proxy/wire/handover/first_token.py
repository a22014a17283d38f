"""How a stream begins before anything was generated, and how it says that nothing will be.

vLLM answers a stream with 200 before the engine has begun. Chat then names the role; typed streams
tell of the answer that they are about to give, `response.created` and the like. Whatever it is, it
shows nothing of a transfer; the first event that carries text does, and so does an error.
"""

from __future__ import annotations

import re

MOST = 1 << 20  # of an opening: it may repeat instructions and tools
STARTS = (b"d", b"e", b":")  # data, event, a remark
END = re.compile(rb"\n\r?\n")
ROLE = re.compile(rb'data: [^\n]*"role": ?"assistant", ?"content": ?(?:""|null)')
# The events of typed streams that come of something: text, an end, an error.
TELLS = re.compile(rb"event: ?\S*(?:delta|done|stop|completed|incomplete|failed|error)")
# Cohere's events have no names; vLLM writes the type last.
COHERE = re.compile(rb'data: ?\{[^\n]*"type": ?"message-start"')
FAILED = re.compile(
    rb'event: ?(?:error|response\.failed)\r?\n|data: ?\{"(?:error"|type": ?"error")'
    rb'|data: ?\{"type": ?"message-end"[^\n]*"error"'
)


def after(text: bytes) -> int:
    """Find where the first whole event begins that tells something; -1 while there is none."""
    at = 0
    if not text.startswith(STARTS):
        return 0  # no stream
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
    """Whether a stream begins with an error, as after a transfer that failed."""
    return FAILED.match(text, max(after(text), 0)) is not None

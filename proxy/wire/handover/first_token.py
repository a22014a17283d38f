"""Finds the first event of a stream that shows whether the KV transfer worked.

vLLM sends opening events before the engine starts: a chat role, or events such as
`response.created`. Only the first text or error shows the result.
"""

from __future__ import annotations

import re

MAX_OPENING_BYTES = 1 << 20  # may repeat the instructions
STREAM_STARTS = (b"d", b"e", b":")  # data, event, comment
EVENT_END = re.compile(rb"\n\r?\n")
ROLE = re.compile(rb'data: [^\n]*"role": ?"assistant", ?"content": ?(?:""|null)')
# Text, an end or an error.
RESULT_EVENT = re.compile(rb"event: ?\S*(?:delta|done|stop|completed|incomplete|failed|error)")
# Cohere's events have no names; vLLM writes the type last.
COHERE = re.compile(rb'data: ?\{[^\n]*"type": ?"message-start"')
FAILED = re.compile(
    rb'event: ?(?:error|response\.failed)\r?\n|data: ?\{"(?:error"|type": ?"error")'
    rb'|data: ?\{"type": ?"message-end"[^\n]*"error"'
)


def find_result(text: bytes) -> int:
    at = 0
    if not text.startswith(STREAM_STARTS):
        return 0  # not an event stream
    while (end := EVENT_END.search(text, at)) is not None:
        if not _is_quiet(text, at, end.start()):
            return at
        at = end.end()
    return -1


def _is_quiet(text: bytes, at: int, end: int) -> bool:
    if text.startswith(b"event:", at):
        return RESULT_EVENT.match(text, at, end) is None
    if text.startswith(b":", at):
        return True
    return any(pattern.match(text, at, end) for pattern in (ROLE, COHERE))


def begins_with_error(text: bytes) -> bool:
    return FAILED.match(text, max(find_result(text), 0)) is not None

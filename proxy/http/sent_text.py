"""The text of a stream that the client has, and the rest of it from another worker.

The other worker returns the whole text again. Its events are dropped until the client's text is
complete; the event in which that happens is cut.

Text is compared as it is in JSON. An escape is never cut, because pieces of a stream end between
characters.
"""

from __future__ import annotations

import re
from collections import deque

# Quotes in a text are escaped, so these keys are never part of one.
TEXT = re.compile(rb'"(?:content|text)" ?: ?"([^"\\]*(?:\\.[^"\\]*)*)"')
OTHER_OUTPUT = re.compile(
    rb'"(?:reasoning|reasoning_content|refusal|arguments)" ?: ?"[^"]|"tool_calls" ?: ?\[ ?\{'
    rb'|"logprobs" ?: ?\{|"token_ids" ?: ?\[ ?\d'
)
# Without any of these in the bytes, the search above finds nothing.
OTHER_KEYS = (
    b'"reasoning', b'"refusal"', b'"arguments"', b'"tool_calls"', b'"logprobs":{', b'"logprobs": {',
    b'"token_ids":[', b'"token_ids": [',
)  # fmt: skip
FINISHED = re.compile(rb'"finish_reason" ?: ?"')
# An engine that dies or stops under a living server.
FAILED = re.compile(rb'(?:\A|\n)data: ?\{"error"|"finish_reason" ?: ?"abort"')
ABORTED = b'"finish_reason":"abort"'
DONE = b"data: [DONE]"
EVENT_END = b"\n\n"
TAIL_BYTES = 64
# Kept for the usage and the end of the stream.
MAX_LAST_PIECES = 3


class TextDiffersError(Exception):
    """The other worker's text does not begin with the client's."""


def has_other_output(data: bytes) -> bool:
    found = any(key in data for key in OTHER_KEYS)
    return found and OTHER_OUTPUT.search(data) is not None


class SentText:
    """Counts the text in a stream's events, in batches: this costs the stream nothing."""

    __slots__ = ("_tail", "length", "other_output", "pieces")

    def __init__(self, pieces: deque[bytes]) -> None:
        self.pieces = deque(pieces)
        self.length = 0
        self.other_output = False  # besides text
        self._tail = b""

    def condense(self, leave: int = MAX_LAST_PIECES) -> None:
        """Count the text of all but the last pieces, and forget them."""
        count = len(self.pieces) - leave
        if count <= 0:
            return
        data = b"".join([self.pieces.popleft() for _ in range(count)])
        text = b"".join(TEXT.findall(data))
        self.length += len(text)
        self._tail = (self._tail + text)[-TAIL_BYTES:]
        self.other_output = self.other_output or has_other_output(data)

    @property
    def has_other_output(self) -> bool:
        """True if the stream has more than text."""
        return self.other_output or has_other_output(b"".join(self.pieces))

    def rest(self) -> RestOfText:
        """Return the filter of the other worker's stream."""
        self.condense(0)
        return RestOfText(self.length, self._tail)


class RestOfText:
    """Removes the beginning of a stream, which the client has."""

    __slots__ = ("_held", "_left", "_read", "_tail", "is_reached")

    def __init__(self, length: int, tail: bytes) -> None:
        self.is_reached = False  # the rest passes unchanged
        self._left = length
        self._tail = tail
        self._read = b""  # the end of the dropped text
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the events that are new; raise `TextDiffersError` if the beginning differs."""
        if self.is_reached:
            return data
        data = self._held + data
        while (end := data.find(EVENT_END) + len(EVENT_END)) >= len(EVENT_END):
            event, data = data[:end], data[end:]
            if (new := self._new_in(event)) is not None:
                self.is_reached = True
                return new + data
        self._held = data
        return b""

    def _new_in(self, event: bytes) -> bytes | None:
        """Return what is new from this event on; None if the client has more text than that."""
        found, ends = TEXT.search(event), FINISHED.search(event) is not None
        if has_other_output(event) or FAILED.search(event) is not None:
            raise TextDiffersError
        text = b"" if found is None else found[1]
        known = text[: self._left]
        self._left -= len(known)
        self._read = (self._read + known)[-TAIL_BYTES:]
        ends = ends or event.startswith(DONE)
        if self._left:
            if ends:
                raise TextDiffersError
            return None
        if self._read != self._tail:
            raise TextDiffersError
        if found is None:  # before or after the text
            if event.startswith(DONE):
                raise TextDiffersError  # without a reason of the end
            return event if ends else None
        if len(known) == len(text) and not ends:
            return b"" if known else None
        return event[: found.start(1)] + text[len(known) :] + event[found.end(1) :]

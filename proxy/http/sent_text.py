"""The output of a stream that the client has, and the rest of it from another worker.

The other worker returns the whole output again. Its events are dropped until each text of the
client is complete; the events in which that happens are cut.
"""

from __future__ import annotations

import re
from collections import deque
from zlib import crc32

from proxy.http.output_parts import (
    CONTENT,
    STRING,
    TOOL_CALLS,
    OtherOutputError,
    OutputPart,
    OutputReader,
    parse_event,
    remove_known,
)

# An engine that dies or stops under a living server.
FAILED = re.compile(
    rb'(?:\A|\n)(?:data: ?\{"error"|event: ?error)|"finish_reason" ?: ?"abort"'
    rb'|"delta" ?: ?\{"stop_reason" ?: ?null'
)
# One of these is in each such report of vLLM, in a chat's stream and in one of `/v1/messages`.
CHAT_FAILURES = b'data: {"error"', b'"finish_reason":"abort"'
MESSAGE_FAILURES = b"event: error", b'"delta":{"stop_reason":null'
DATA = re.compile(rb"(?:\A|\n)data: ?([^\n]*)")
# The last event but for the usage.
ENDED = re.compile(rb'"finish_reason" ?: ?"|(?:\A|\n)event: ?message_delta')
MESSAGE = re.compile(rb'"message" ?: ?' + STRING)
DONE = b"[DONE]"
EVENT_END = b"\n\n"
# Kept for the usage and the end of the stream.
MAX_LAST_PIECES = 3
# An event with all output so far, and what is new before each text is complete.
MAX_EVENT_BYTES, MAX_NEW_BYTES = 16 << 20, 64 << 10
MAX_MESSAGE_BYTES = 200
MAX_CONTENT = 1 << 20  # characters that are kept


class TextDiffersError(Exception):
    """The other worker's output does not begin with the client's."""


class EngineFailedError(Exception):
    """The other worker reports a failure; the argument is its message."""


class SentText:
    """Counts the text in a stream's events, in batches."""

    __slots__ = ("_content", "_ended", "_messages", "_other", "_reader", "_texts", "pieces")

    def __init__(
        self, pieces: deque[bytes], *, messages: bool = False, keeps_content: bool = False
    ) -> None:
        self.pieces = deque(pieces)
        self._messages = messages
        self._reader = OutputReader(messages=messages)
        self._texts: dict[str, tuple[int, int]] = {}  # characters and checksum of each channel
        self._other = ""
        self._content: list[str] | None = [] if keeps_content else None
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """True if the client has the reason of the end."""
        return self._ended or ENDED.search(b"".join(self.pieces)) is not None

    @property
    def failures(self) -> tuple[bytes, ...]:
        return MESSAGE_FAILURES if self._messages else CHAT_FAILURES

    def condense(self, leave: int = MAX_LAST_PIECES) -> None:
        """Count the text of all but the last pieces, and forget them."""
        count = len(self.pieces) - leave
        if count <= 0:
            return
        events = b"".join([self.pieces.popleft() for _ in range(count)])
        if self._other:
            return
        try:
            for channel, text in self._reader.texts(events).items():
                length, checksum = self._texts.get(channel, (0, 0))
                self._texts[channel] = length + len(text), crc32(text.encode(), checksum)
                if self._content is not None and channel == CONTENT:
                    self._content.append(text)
                    if length + len(text) > MAX_CONTENT:
                        self._content = None
        except OtherOutputError as error:
            self._other = str(error)

    @property
    def other_output(self) -> str:
        """Output that can't be compared; empty if there is none."""
        if self._other:
            return self._other
        try:
            self._last_texts()
        except OtherOutputError as error:
            return str(error)
        return ""

    @property
    def is_empty(self) -> bool:
        if self.other_output:
            return False
        texts = self._last_texts()
        return not any(texts.values()) and not any(length for length, _ in self._texts.values())

    @property
    def content(self) -> str | None:
        """The text of a stream with no other output; None if it is not kept."""
        if self._content is None or self.other_output:
            return None
        last = self._last_texts()
        channels = {channel for channel, text in last.items() if text}
        channels |= {channel for channel, (length, _) in self._texts.items() if length}
        if channels - {CONTENT}:
            return None
        return "".join((*self._content, last.get(CONTENT, "")))

    def _last_texts(self) -> dict[str, str]:
        reader = OutputReader(messages=self._messages, call=self._reader.call)
        return reader.texts(b"".join(self.pieces))

    def rest(self, space: str | None = None) -> RestOfText:
        """Return the filter of the other worker's stream.

        `space`: that stream goes on behind the content but for this space at its end.
        """
        self._ended = self.has_ended
        self.condense(0)
        if space is not None:
            return RestBehindText(space)
        return RestOfText(self._texts, messages=self._messages, ended=self._ended)


class RestOfText:
    __slots__ = ("_checksums", "_ended", "_held", "_left", "_new", "_reader", "is_caught_up")

    def __init__(
        self, texts: dict[str, tuple[int, int]], *, messages: bool = False, ended: bool = False
    ) -> None:
        self.is_caught_up = False  # the rest passes unchanged
        self._ended = ended  # only the usage is new
        self._reader = OutputReader(messages=messages)
        # Characters and checksum of what is still to be repeated.
        self._left = {channel: length for channel, (length, _) in texts.items() if length}
        self._checksums = {channel: (checksum, 0) for channel, (_, checksum) in texts.items()}
        self._held = b""
        self._new: list[bytes] = []  # events, while another text is not complete

    def feed(self, data: bytes) -> bytes:
        """Return the events that are new; raise `TextDiffersError` if the beginning differs."""
        reached = self.is_caught_up
        if reached:
            return data
        data = self._held + data
        while (end := data.find(EVENT_END) + len(EVENT_END)) >= len(EVENT_END):
            event, data = data[:end], data[end:]
            if new := self._new_in(event):
                self._new.append(new)
            if self.is_caught_up:
                new, self._new = b"".join(self._new), []
                return new + data
        if len(data) > MAX_EVENT_BYTES or sum(map(len, self._new)) > MAX_NEW_BYTES:
            raise TextDiffersError
        self._held = data
        return b""

    def _new_in(self, event: bytes) -> bytes:
        """Return the part of an event that the client does not have."""
        match = DATA.search(event)
        if match is None:
            return b""
        if FAILED.search(event) is not None:
            raise EngineFailedError(message_in(match[1]))
        if match[1].startswith(DONE):  # without a reason of the end
            raise TextDiffersError
        try:
            whole = parse_event(match[1])
            parts = [(part, self._count_known(part)) for part in self._reader.parts(whole)]
        except OtherOutputError:
            raise TextDiffersError from None
        ends = ends_output(whole)
        if self._left:
            if ends:
                self._end_early()
        elif ends or (parts and not self._ended):
            self.is_caught_up = True
        known_chars = sum(count for _, count in parts)
        has_new_text = known_chars < sum(len(part.text) for part, _ in parts)
        if has_new_text and self._ended:
            raise TextDiffersError
        if self._ended or not (has_new_text or ends):
            return b""
        if not known_chars:
            return event
        return event[: match.start(1)] + remove_known(parts, whole) + event[match.end(1) :]

    def _end_early(self) -> None:
        """Handle an end before the text of the client."""
        raise TextDiffersError

    def _count_known(self, part: OutputPart) -> int:
        """Return how many characters of a part the client has."""
        left = self._left.get(part.channel, 0)
        if not left:
            return 0
        known_chars = min(left, len(part.text))
        expected, checksum = self._checksums[part.channel]
        checksum = crc32(part.text[:known_chars].encode(), checksum)
        self._checksums[part.channel] = expected, checksum
        if known_chars < left:
            self._left[part.channel] = left - known_chars
        else:
            del self._left[part.channel]
            if checksum != expected:
                raise TextDiffersError
        return known_chars


class RestBehindText(RestOfText):
    """Passes a stream that goes on behind the client's text, without space that both have."""

    __slots__ = ("_space",)

    def __init__(self, space: str) -> None:
        super().__init__({CONTENT: (len(space), 0)} if space else {})
        self._space = space

    def _count_known(self, part: OutputPart) -> int:
        if part.channel not in {CONTENT, TOOL_CALLS}:  # it began anew
            raise TextDiffersError
        if not self._left:
            return 0
        common = 0
        for ours, theirs in zip(self._space, part.text, strict=False):
            if ours != theirs:
                break
            common += 1
        self._space = self._space[common:] if common == len(part.text) else ""
        if not self._space:
            self._left.clear()
        return common

    def _end_early(self) -> None:
        self._left.clear()
        self.is_caught_up = True


def message_in(data: bytes) -> str:
    match = MESSAGE.search(data)
    if match is None:
        return "it stopped"
    return match[1][:MAX_MESSAGE_BYTES].decode("utf-8", "replace")


def ends_output(event: dict[str, object]) -> bool:
    """Return True if no output follows an event."""
    choices = event.get("choices")
    if isinstance(choices, list):
        return any(choice.get("finish_reason") for choice in choices)
    return event.get("type") in {"message_delta", "message_stop"}

"""What can be learnt from a stream of events while it passes, at a microsecond or two per piece.

Only whole events are let through. So a client never sees half of one followed by an error, and
the error event that tells it of a worker's death always starts on a line of its own.

An event counts as a token once it carries text. Chat streams open with a delta that names the role
and has no text, and end with usage or an error, perhaps, and a last word; typed streams say `delta`
of those that have, in the event's name (responses, messages) or in its data (cohere).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from proxy.core.model.types import Usage
from proxy.http.error_formats import StreamFormat, error_event

MAX_HELD = 1 << 20
# Where usage is looked for: in a body's last bytes, in a stream's last pieces (the event that has
# it may be followed by one or two that end the stream).
TAIL = 1 << 16
LAST_PIECES = 3
USAGE_BYTES = 1024
MOST_TOKENS = 10**9  # that a worker is believed to have computed for one request

USAGE = b'"usage":'
PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
WRITTEN = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
# Cohere's numbers are written as 5.0.
CACHED = re.compile(rb'"(?:cached|cache_read_input)_tokens"\s*:\s*(\d+)(?:\.\d+)?')
# Anthropic's `input_tokens` leave out what was cached, read or written, which is told beside them.
TYPED, READ = b'"input', b'"cache_read'
APART = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d+)')
# How a piece ends, the second as a chunk: with a choice, as nearly all do, or with the last word.
CHOICE = b"}]}\n\n", b"}]}\n\n\r\n", b"}]}\r\n\r\n"
LAST_WORDS = b"[DONE]\n\n", b"[DONE]\n\n\r\n", b"[DONE]\r\n\r\n"
DONE = re.compile(rb"(?:\A|\n)data: ?\[DONE\]")  # no line of JSON begins so, whatever text is in it
# The last event of a stream, where it is another. Quotes in a text are escaped.
LAST_EVENTS = {
    StreamFormat.RESPONSES: re.compile(
        rb"(?:\A|\n)event: ?response\.(?:completed|incomplete|failed)\r?\n"
    ),
    StreamFormat.MESSAGES: re.compile(rb"(?:\A|\n)event: ?message_stop\r?\n"),
    StreamFormat.COHERE: re.compile(rb'"type":"message-end"'),
}
ERROR, EMPTY = b'data: {"error"', b"[]"
COMMENT = b"\n:"  # as keeps a connection alive; no line of JSON begins so
# Of typed streams, what ends an answer and what signs a thought; both end as no other delta does.
NO_TEXT, SIGNATURE = b"e_delta", re.compile(rb'"type"\s*:\s*"signature_delta"')
RESPONSES = re.compile(rb"event: ?response\.")
NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,18})')  # of its events
COHERE = b'"type":"message-start"'
CONTENT, TOOL_CALL = b'"type":"content-delta"', b'"type":"tool-call-delta"'
TOOL_PLAN = b'"type":"tool-plan-delta"'
CALLS = b'"type":"tool-call-start"'  # with the name, which was generated; often with all arguments


class EventStream:
    """The events of one answer."""

    __slots__ = ("_held", "_last", "_started", "count", "keep", "manner", "tokens", "torn")

    def __init__(self) -> None:
        self.manner = StreamFormat.CHAT
        self.count: Callable[[bytes], int] = choices_in  # tokens in whole events
        self.torn = False  # an event too large to hold back has passed in part
        self.tokens = 0  # carried by what `feed` returned last
        self._held = b""
        self._started = False  # a token was seen
        self._last: deque[bytes] = deque(maxlen=LAST_PIECES)
        self.keep = self._last.append  # a piece that need not be fed: of whole events, as it came

    @property
    def flows(self) -> bool:
        """Whether whole events may pass it by: none is held in part, and tokens have come."""
        return self._started and not self._held and not self.torn

    def feed(self, data: bytes) -> bytes:
        """Take in a piece of body; returns the whole events there are now."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(b"\n\n"):
            end = _end_of_events(data)
            data, self._held = data[:end], data[end:]
            if len(self._held) > MAX_HELD:
                self.torn = True
            if self.torn:
                data, self._held = data + self._held, b""
        if not data:
            self.tokens = 0
            return data
        self._last.append(data)
        if self._started:
            self.tokens = self.count(data)
        else:
            self._open(data)
        return data

    def rest(self) -> bytes:
        """Return what was held back, now that the answer has ended."""
        return self._held

    def says_done(self, more: bytes = b"") -> bool:
        """Whether its last word is there, with what may have come and was not fed."""
        return DONE.search(b"".join((*self._last, self._held, more))) is not None

    @property
    def is_whole(self) -> bool:
        """Whether the last event of the stream has passed."""
        passed, last = b"".join(self._last), LAST_EVENTS.get(self.manner)
        if self.torn and _end_of_events(passed) < len(passed):
            return False  # the rest of an event is missing
        return DONE.search(passed) is not None or (last is not None and bool(last.search(passed)))

    def usage(self) -> Usage | None:
        """Return what the last events say of it."""
        return usage_in(b"".join(self._last))

    def error_event(self, message: str, code: str) -> bytes:
        """Write the event that ends a stream whose worker is gone, in the stream's own manner."""
        numbers = NUMBER.findall(b"".join(self._last))
        return error_event(self.manner, message, code, int(numbers[-1]) + 1 if numbers else 0)

    def _open(self, data: bytes) -> None:
        """Count no token before the first event that carries one."""
        if self.manner is not StreamFormat.CHAT:
            pass
        elif data.startswith(b"event:"):
            self.count = deltas_in
            self.manner = StreamFormat.RESPONSES if RESPONSES.match(data) else StreamFormat.MESSAGES
        elif COHERE in data:
            self.manner, self.count = StreamFormat.COHERE, cohere_deltas_in
        if self.count is choices_in:
            events = data.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
            while events and not carries_token(events[0]):
                del events[0]
            data = b"\n\n".join((*events, b""))
        self.tokens = self.count(data)
        self._started = self.tokens > 0


# Each counts the events that carry a token, once one has; they may be framed as a chunk. To search
# every piece for what is rare would cost as much as all the rest, so what is usual is known first.


def choices_in(events: bytes) -> int:
    """Count tokens of a stream without types."""
    count = events.count(b"\n\n") or events.count(b"\r\n\r\n")
    if events.endswith(CHOICE):
        return count
    if EMPTY in events:
        count -= len(NO_CHOICES.findall(events))
    count -= events.count(ERROR) + events.count(COMMENT) + events.startswith(COMMENT[1:])
    return count - 1 if events.endswith(LAST_WORDS) else count


def deltas_in(events: bytes) -> int:
    """Count tokens of a stream whose events have names."""
    # No line of JSON ends so, whatever text is in it.
    deltas = events.count(b"delta\n") or events.count(b"delta\r\n")
    if not deltas or NO_TEXT not in events:
        return deltas
    deltas -= events.count(b"message_delta\n") or events.count(b"message_delta\r\n")
    return deltas - len(SIGNATURE.findall(events))


def cohere_deltas_in(events: bytes) -> int:
    """Count tokens of a stream whose events say in JSON what they are."""
    # Quotes in a text are escaped.
    deltas = events.count(CONTENT) + events.count(TOOL_CALL) + events.count(TOOL_PLAN)
    return deltas + events.count(CALLS)


def carries_token(event: bytes) -> bool:
    """Whether an event without a type has text in it, or whatever else was generated."""
    opens = b'"role":"assistant"' in event and (
        b'"content":""' in event or b'"content":null' in event
    )
    if opens and b'"tool_calls":[{' not in event:
        return False
    return event.startswith(b"data:") and not event.startswith(ERROR)


def usage_in(text: bytes) -> Usage | None:
    """Read the last `usage` of a JSON text, or of its last part, without parsing the rest.

    Quotes inside strings are escaped, so the key can't be met in what a model wrote.
    """
    at = text.rfind(USAGE, max(0, len(text) - TAIL))
    if at < 0:
        return None
    end = at + USAGE_BYTES
    numbers = [pattern.search(text, at, end) for pattern in (PROMPT, WRITTEN, CACHED)]
    if (first := numbers[0]) is None:
        return None
    prompt, written, cached = [int(found[1]) if found else 0 for found in numbers]
    if first[0].startswith(TYPED) and text.find(b'"cache_', at, end) >= 0:
        prompt += sum(map(int, APART.findall(text, at, end)))
    return Usage(*(min(each, MOST_TOKENS) for each in (prompt, written, cached)))


def without_usage(events: bytes) -> bytes:
    """Leave the last event out that has `usage`, if it has nothing else."""
    at = events.rfind(USAGE)
    start = _end_of_events(events[:at])
    end = start + _end_of_first(events[start:])
    if NO_CHOICES.search(events, start, end) is None:
        return events
    return events[:start] + events[end:]


def recounted(text: bytes, cached: int) -> bytes:
    """Put another number of cached tokens into the last `usage` of a text, if it has one.

    Where those are told apart from the prompt's others, the two come to as much as before.
    """
    at = text.rfind(USAGE)
    if at < 0 or (found := CACHED.search(text, at, at + USAGE_BYTES)) is None:
        return text
    changes = [(found.start(1), found.end(), cached)]
    others = PROMPT.search(text, at, at + USAGE_BYTES)
    if others is not None and found[0].startswith(READ) and others[0].startswith(TYPED):
        rest = int(others[1]) + int(found[1]) - cached
        changes.append((others.start(1), others.end(), max(rest, 0)))
    for start, end, number in sorted(changes, reverse=True):
        text = b"%b%d%b" % (text[:start], number, text[end:])
    return text


def _end_of_events(data: bytes) -> int:
    """Find where the last whole event ends."""
    if (end := data.rfind(b"\n\n")) >= 0:
        return end + 2
    return end + 4 if (end := data.rfind(b"\r\n\r\n")) >= 0 else 0


def _end_of_first(data: bytes) -> int:
    """Find where the first event ends, if only with all of it."""
    if (end := data.find(b"\n\n")) >= 0:
        return end + 2
    return end + 4 if (end := data.find(b"\r\n\r\n")) >= 0 else len(data)

"""Tokens, usage and the end of a stream of server-sent events, in 1 to 2 µs per piece.

Only whole events are forwarded, so an error event never follows half an event.

An event with text is a token. Chat streams have others: role, comments, usage, errors, `[DONE]`.
Typed streams mark text with `delta`, in the event name or (cohere) in the data.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from proxy.core.model.types import Usage
from proxy.http.error_formats import StreamFormat, error_event
from proxy.http.sent_text import MAX_LAST_PIECES, SentText

MAX_HELD = 1 << 20
# Where usage is searched: the end of a body or stream (two events may follow usage).
TAIL = 1 << 16
MAX_USAGE_BYTES = 1024
MAX_USAGE_TOKENS = 10**9

USAGE = b'"usage":'
PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
# Cohere writes numbers as 5.0.
CACHED_TOKENS = re.compile(rb'"(?:cached|cache_read_input)_tokens"\s*:\s*(\d+)(?:\.\d+)?')
USAGE_NUMBERS = PROMPT_TOKENS, COMPLETION_TOKENS, CACHED_TOKENS
# Anthropic's `input_tokens` exclude the cache's tokens.
INPUT_KEY, CACHE_READ_KEY = b'"input', b'"cache_read'
CACHE_TOKENS = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d+)')
# Ends of a piece, plain or as an HTTP chunk.
CHOICE_ENDS = b"}]}\n\n", b"}]}\n\n\r\n", b"}]}\r\n\r\n"
DONE_ENDS = b"[DONE]\n\n", b"[DONE]\n\n\r\n", b"[DONE]\r\n\r\n"
DONE = re.compile(rb"(?:\A|\n)data: ?\[DONE\]")  # JSON never begins a line so
# Quotes in generated text are escaped.
LAST_EVENTS = {
    StreamFormat.RESPONSES: re.compile(
        rb"(?:\A|\n)event: ?response\.(?:completed|incomplete|failed)\r?\n"
    ),
    StreamFormat.MESSAGES: re.compile(rb"(?:\A|\n)event: ?message_stop\r?\n"),
    StreamFormat.COHERE: re.compile(rb'"type":"message-end"'),
}
TYPED_ERROR = re.compile(rb"(?:\A|\n)event: ?error\r?\n")
DONE_EVENT = b"data: [DONE]\n\n"
STOP_EVENT = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
FINISHED = re.compile(rb'"finish_reason" ?: ?"(?!abort")')
MESSAGE_FINISHED = re.compile(
    rb'(?:\A|\n)event: ?message_delta\r?\ndata: ?[^\n]*"stop_reason" ?: ?"'
)
ERROR_EVENT, EMPTY_LIST = b'data: {"error"', b"[]"
COMMENT = b"\n:"
# Typed deltas without text: the end of a message, a signature.
TEXTLESS_DELTA, SIGNATURE = b"e_delta", re.compile(rb'"type"\s*:\s*"signature_delta"')
RESPONSES_EVENT = re.compile(rb"event: ?response\.")
SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,18})')
COHERE_START = b'"type":"message-start"'
CONTENT_DELTA, TOOL_CALL_DELTA = b'"type":"content-delta"', b'"type":"tool-call-delta"'
TOOL_PLAN_DELTA = b'"type":"tool-plan-delta"'
TOOL_CALL_START = b'"type":"tool-call-start"'  # the name is generated


class EventStream:
    """The events of one response."""

    __slots__ = ("_held", "_last", "_started", "count", "keep", "stream_format", "tokens", "torn")

    def __init__(self) -> None:
        self.stream_format = StreamFormat.CHAT
        self.count: Callable[[bytes], int] = choices_in  # tokens in whole events
        self.torn = False  # a part of an event was forwarded
        self.tokens = 0  # in the last result of `feed`
        self._held = b""
        self._started = False
        self._last: deque[bytes] = deque(maxlen=MAX_LAST_PIECES)
        self.keep = self._last.append  # for events that bypass `feed`

    def collect_text(self, *, keeps_content: bool) -> SentText:
        """Count the text from now on, and what was kept of it so far."""
        is_message = self.stream_format is StreamFormat.MESSAGES
        sent = SentText(self._last, messages=is_message, keeps_content=keeps_content)
        self._last = sent.pieces
        self.keep = sent.pieces.append
        return sent

    def drop_partial_event(self) -> None:
        """Forget the beginning of an event that no worker completes."""
        self._held = b""

    @property
    def can_bypass_feed(self) -> bool:
        return self._started and not self._held and not self.torn

    def feed(self, data: bytes) -> bytes:
        """Return the events that this piece completes."""
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
        return self._held

    def has_done(self, more: bytes = b"") -> bool:
        """Return True if `[DONE]` has arrived, also in `more` bytes."""
        return DONE.search(b"".join((*self._last, self._held, more))) is not None

    @property
    def lacks_typed_end(self) -> bool:
        """True if the events have types, and none is the last event or an error."""
        if self.stream_format not in LAST_EVENTS or self.is_complete:
            return False
        return TYPED_ERROR.search(b"".join(self._last)) is None

    @property
    def is_complete(self) -> bool:
        """True once the last event of the stream is complete."""
        passed, last = b"".join(self._last), LAST_EVENTS.get(self.stream_format)
        if self.torn and _end_of_events(passed) < len(passed):
            return False
        return DONE.search(passed) is not None or (last is not None and bool(last.search(passed)))

    def missing_end(self, *, needs_usage: bool) -> bytes | None:
        """Return the last event of a stream that lacks nothing else; None if it lacks more."""
        if self.is_complete:
            return b""
        if self.torn:
            return None
        passed = b"".join(self._last)
        if self.stream_format is StreamFormat.MESSAGES:
            return STOP_EVENT if MESSAGE_FINISHED.search(passed) else None
        finished = FINISHED.search(passed)
        if self.stream_format is not StreamFormat.CHAT or finished is None or ERROR_EVENT in passed:
            return None
        usage = NO_CHOICES.search(passed, finished.end())
        return None if needs_usage and usage is None else DONE_EVENT

    def usage(self) -> Usage | None:
        return usage_in(b"".join(self._last))

    def error_event(self, message: str, code: str) -> bytes:
        """Return the event that ends the stream after a failure."""
        numbers = SEQUENCE_NUMBER.findall(b"".join(self._last))
        return error_event(
            self.stream_format, message, code, int(numbers[-1]) + 1 if numbers else 0
        )

    def _open(self, data: bytes) -> None:
        """Detect the format; skip events before the first token."""
        if self.stream_format is not StreamFormat.CHAT:
            pass
        elif data.startswith(b"event:"):
            self.count = deltas_in
            self.stream_format = (
                StreamFormat.RESPONSES if RESPONSES_EVENT.match(data) else StreamFormat.MESSAGES
            )
        elif COHERE_START in data:
            self.stream_format, self.count = StreamFormat.COHERE, cohere_deltas_in
        if self.count is choices_in:
            events = data.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
            while events and not carries_token(events[0]):
                del events[0]
            data = b"\n\n".join((*events, b""))
        self.tokens = self.count(data)
        self._started = self.tokens > 0


# Searching every piece for rare events doubles the cost, so these test for the usual case first.


def choices_in(events: bytes) -> int:
    count = events.count(b"\n\n") or events.count(b"\r\n\r\n")
    if events.endswith(CHOICE_ENDS):
        return count
    if EMPTY_LIST in events:
        count -= len(NO_CHOICES.findall(events))
    count -= events.count(ERROR_EVENT) + events.count(COMMENT) + events.startswith(COMMENT[1:])
    return count - 1 if events.endswith(DONE_ENDS) else count


def deltas_in(events: bytes) -> int:
    # JSON never ends a line so.
    deltas = events.count(b"delta\n") or events.count(b"delta\r\n")
    if not deltas or TEXTLESS_DELTA not in events:
        return deltas
    deltas -= events.count(b"message_delta\n") or events.count(b"message_delta\r\n")
    return deltas - len(SIGNATURE.findall(events))


def cohere_deltas_in(events: bytes) -> int:
    deltas = (
        events.count(CONTENT_DELTA) + events.count(TOOL_CALL_DELTA) + events.count(TOOL_PLAN_DELTA)
    )
    return deltas + events.count(TOOL_CALL_START)


def carries_token(event: bytes) -> bool:
    """Return True if an untyped event has generated content."""
    opens = b'"role":"assistant"' in event and (
        b'"content":""' in event or b'"content":null' in event
    )
    if opens and b'"tool_calls":[{' not in event:
        return False
    return event.startswith(b"data:") and not event.startswith(ERROR_EVENT)


def usage_in(text: bytes) -> Usage | None:
    """Return the last `usage` at the end of a JSON text.

    Quotes in strings are escaped, so generated text never contains the key.
    """
    at = text.rfind(USAGE, max(0, len(text) - TAIL))
    if at < 0:
        return None
    end = at + MAX_USAGE_BYTES
    numbers = [pattern.search(text, at, end) for pattern in USAGE_NUMBERS]
    if (first := numbers[0]) is None:
        return None
    prompt, written, cached = [int(match[1]) if match else 0 for match in numbers]
    if first[0].startswith(INPUT_KEY) and text.find(b'"cache_', at, end) >= 0:
        prompt += sum(map(int, CACHE_TOKENS.findall(text, at, end)))
    return Usage(*(min(number, MAX_USAGE_TOKENS) for number in (prompt, written, cached)))


def remove_usage(events: bytes) -> bytes:
    """Remove the last event that has only `usage`."""
    at = events.rfind(USAGE)
    start = _end_of_events(events[:at])
    end = start + _end_of_first(events[start:])
    if NO_CHOICES.search(events, start, end) is None:
        return events
    return events[:start] + events[end:]


def usage_with_output(usage: Usage, tokens: int) -> Usage:
    """Return the usage without the output in the prompt."""
    prompt = max(usage.prompt_tokens - tokens, 0)
    return Usage(prompt, usage.completion_tokens + tokens, min(usage.cached_tokens, prompt))


def move_to_output(text: bytes, tokens: int) -> bytes:
    """Correct the last `usage` in the same way."""
    if (usage := usage_in(text)) is None:
        return text
    usage, at = usage_with_output(usage, tokens), text.rfind(USAGE)
    numbers = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    matches = [name.search(text, at, at + MAX_USAGE_BYTES) for name in USAGE_NUMBERS]
    changes = [(f.start(1), f.end(), n) for f, n in zip(matches, numbers, strict=True) if f]
    return _with_numbers(text, changes)


def replace_cached_tokens(text: bytes, cached: int) -> bytes:
    """Replace the cached tokens in the last `usage`.

    Anthropic's sum of cached and other prompt tokens stays the same.
    """
    at = text.rfind(USAGE)
    if at < 0 or (match := CACHED_TOKENS.search(text, at, at + MAX_USAGE_BYTES)) is None:
        return text
    changes = [(match.start(1), match.end(), cached)]
    others = PROMPT_TOKENS.search(text, at, at + MAX_USAGE_BYTES)
    if (
        others is not None
        and match[0].startswith(CACHE_READ_KEY)
        and others[0].startswith(INPUT_KEY)
    ):
        rest = int(others[1]) + int(match[1]) - cached
        changes.append((others.start(1), others.end(), max(rest, 0)))
    return _with_numbers(text, changes)


def _with_numbers(text: bytes, changes: list[tuple[int, int, int]]) -> bytes:
    for start, end, number in sorted(changes, reverse=True):
        text = b"%b%d%b" % (text[:start], number, text[end:])
    return text


def _end_of_events(data: bytes) -> int:
    if (end := data.rfind(b"\n\n")) >= 0:
        return end + 2
    return end + 4 if (end := data.rfind(b"\r\n\r\n")) >= 0 else 0


def _end_of_first(data: bytes) -> int:
    if (end := data.find(b"\n\n")) >= 0:
        return end + 2
    return end + 4 if (end := data.find(b"\r\n\r\n")) >= 0 else len(data)

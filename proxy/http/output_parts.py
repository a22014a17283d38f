"""The generated output in a stream's events, as texts that grow.

A chat's stream has one text for each kind of output: the content, the reasoning, and all tool
calls. A stream of `/v1/messages` is one text: its blocks follow each other.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

# Quotes in a text are escaped, so these keys are never part of one.
STRING = rb'"([^"\\]*(?:\\.[^"\\]*)*)"'
DATA = re.compile(rb"(?:\A|\n)data: ?(\{[^\n]*)")
CHOICES, INDEX, BLOCK_EVENTS = b'"choices"', b'"index":', b'"content_block_'
# With any of these, a chat has more than the texts below.
OTHER_KEYS = (
    b'"refusal"', b'"arguments"', b'"tool_calls"', b'"logprobs":{', b'"logprobs": {',
    b'"token_ids":[', b'"token_ids": [',
)  # fmt: skip
# With none of these, an event with the arguments of one call has nothing else.
BESIDE_ARGUMENTS = b'"content":"', b'"reasoning', b'"refusal":"', b'"name"'
CONTENT, TOOL_CALLS, BLOCKS = "content", "tool_calls", "blocks"
# Members of a delta with text, and its channel.
CHANNELS = {
    "content": CONTENT, "reasoning": "reasoning", "reasoning_content": "reasoning_content",
    "refusal": "refusal",
}  # fmt: skip
BLOCK_TEXTS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


def of_key(name: str) -> tuple[bytes, re.Pattern[bytes]]:
    """Return a key and the expression that finds its texts; a key at its beginning is fast."""
    key = b'"%b"' % name.encode()
    return key, re.compile(key + rb" ?: ?" + STRING)


CHAT_TEXTS = [
    (CONTENT, *of_key("content")),
    (CONTENT, *of_key("text")),
    ("reasoning", *of_key("reasoning")),
    ("reasoning_content", *of_key("reasoning_content")),
]
ARGUMENTS = of_key("arguments")[1]
BLOCK_TYPES = [
    (b'"type":"%b","%b":"' % (kind.encode(), name.encode()), of_key(name)[1])
    for kind, name in BLOCK_TEXTS.items()
]


class OtherOutputError(Exception):
    """A stream has output that cannot be compared; the argument names it."""


class OutputPart:
    """A piece of one text in an event."""

    __slots__ = ("channel", "key", "owner", "text")

    def __init__(self, channel: str, text: str, owner: dict[str, Any], key: str) -> None:
        self.channel = channel
        self.text = text
        self.owner = owner  # the JSON object with the text
        self.key = key  # empty: a beginning or an end, which is not cut


class OutputReader:
    __slots__ = ("_messages", "call")

    def __init__(self, *, messages: bool, call: int = -1) -> None:
        self._messages = messages
        self.call = call  # index of the last tool call

    def texts(self, events: bytes) -> dict[str, str]:
        """Return the text of each channel in whole events."""
        if self._messages:
            for start, texts_of in BLOCK_TYPES:
                if (count := events.count(start)) and count == events.count(BLOCK_EVENTS):
                    return {BLOCKS: unescape(texts_of.findall(events))}
            return self._read(events)
        if any(key in events for key in OTHER_KEYS):
            if self._have_arguments_only(events):
                return {TOOL_CALLS: unescape(ARGUMENTS.findall(events))}
            return self._read(events)
        texts: dict[str, str] = {}
        for channel, key, texts_of in CHAT_TEXTS:
            if key in events and (strings := texts_of.findall(events)):
                texts[channel] = unescape(strings)
        return texts

    def _have_arguments_only(self, events: bytes) -> bool:
        """Return whether each event has arguments of the last tool call, and nothing else."""
        count = events.count(b'"tool_calls":[{"index":%d,"function":{"arguments":"' % self.call)
        if not count or count != events.count(CHOICES) or 2 * count != events.count(INDEX):
            return False
        return not any(key in events for key in BESIDE_ARGUMENTS)

    def _read(self, events: bytes) -> dict[str, str]:
        by_channel: dict[str, list[str]] = {}
        for data in DATA.findall(events):
            for part in self.parts(parse_event(data)):
                by_channel.setdefault(part.channel, []).append(part.text)
        return {channel: "".join(texts) for channel, texts in by_channel.items()}

    def parts(self, event: dict[str, Any]) -> list[OutputPart]:
        try:
            parts = parts_of_message(event) if self._messages else self._parts_of_chat(event)
        except (AttributeError, TypeError):  # no object where one is expected
            raise OtherOutputError("data") from None
        if not all(isinstance(part.text, str) for part in parts):
            raise OtherOutputError("data")
        return parts

    def _parts_of_chat(self, event: dict[str, Any]) -> list[OutputPart]:
        parts: list[OutputPart] = []
        for choice in event.get("choices") or ():
            if choice.get("logprobs") or choice.get("token_ids"):
                raise OtherOutputError("logprobs" if choice.get("logprobs") else "token_ids")
            if text := choice.get("text"):
                parts.append(OutputPart(CONTENT, text, choice, "text"))
            delta = choice.get("delta") or {}
            for name, value in delta.items():
                if not value or name == "role":
                    continue
                if name == TOOL_CALLS:
                    for call in value:
                        parts += self._parts_of_call(call)
                elif name in CHANNELS and isinstance(value, str):
                    parts.append(OutputPart(CHANNELS[name], value, delta, name))
                else:
                    raise OtherOutputError(name)
        return parts

    def _parts_of_call(self, call: dict[str, Any]) -> list[OutputPart]:
        function, index = call.get("function") or {}, call.get("index")
        parts: list[OutputPart] = []
        name, arguments = function.get("name"), function.get("arguments")
        if name or call.get("id"):
            if not isinstance(index, int):
                raise OtherOutputError(TOOL_CALLS)
            self.call = index
            parts.append(OutputPart(TOOL_CALLS, f"[{index} {name}]", call, ""))
        if arguments:
            if index != self.call or not isinstance(arguments, str):
                raise OtherOutputError(TOOL_CALLS)
            parts.append(OutputPart(TOOL_CALLS, arguments, function, "arguments"))
        return parts


def parts_of_message(event: dict[str, Any]) -> list[OutputPart]:
    kind, index = event.get("type"), event.get("index")
    if kind == "content_block_delta":
        delta = event.get("delta") or {}
        key = BLOCK_TEXTS.get(str(delta.get("type")), "")
        if key:
            return [OutputPart(BLOCKS, delta.get(key) or "", delta, key)]
        if delta.get("type") == "signature_delta":  # random
            return [OutputPart(BLOCKS, f"[{index} signature]", event, "")]
        raise OtherOutputError(str(delta.get("type")))
    if kind == "content_block_start":
        block = event.get("content_block") or {}
        name = block.get("name") or ""
        texts = [block.get(key) for key in ("text", "thinking", "input", "content")]
        if any(texts):
            raise OtherOutputError(str(block.get("type")))
        return [OutputPart(BLOCKS, f"[{index} {block.get('type')} {name}]", event, "")]
    if kind == "content_block_stop":
        return [OutputPart(BLOCKS, f"[{index} end]", event, "")]
    return []


def parse_event(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise OtherOutputError("data") from None
    if not isinstance(event, dict):
        raise OtherOutputError("data")
    return event


def unescape(texts: list[bytes]) -> str:
    """Return JSON strings, without their quotes, as one text."""
    try:
        text: str = orjson.loads(b'"%b"' % b"".join(texts))
    except orjson.JSONDecodeError:
        raise OtherOutputError("text") from None
    return text


def remove_known(parts: list[tuple[OutputPart, int]], event: dict[str, Any]) -> bytes:
    """Return an event's JSON without the known characters of each part."""
    for part, known_chars in parts:
        if not part.key:
            if known_chars:  # the client has the id of its first worker
                for name in ("id", "type"):
                    part.owner.pop(name, None)
                (part.owner.get("function") or {}).pop("name", None)
        elif known_chars < len(part.text) or part.key == "text":
            part.owner[part.key] = part.text[known_chars:]
        else:
            part.owner.pop(part.key)
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        delta.pop("role", None)
        calls = [c for c in delta.get(TOOL_CALLS) or () if c.get("id") or c.get("function")]
        if calls:
            delta[TOOL_CALLS] = calls
        else:
            delta.pop(TOOL_CALLS, None)
    return orjson.dumps(event)

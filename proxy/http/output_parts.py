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
CONTENT_TEXT = re.compile(rb'"(?:content|text)" ?: ?' + STRING)
TEXT = re.compile(rb'"(content|text|reasoning|reasoning_content)" ?: ?' + STRING)
# The usual events while a tool call is written, and of a block of a message.
ARGUMENTS = re.compile(
    rb'"delta":\{(?:"content":null,)?"tool_calls":\[\{"index":(\d+),"function":\{"arguments":'
    + STRING
    + rb"\}\}\]\}"
)
BLOCK_TEXT = re.compile(
    rb'"delta":\{"type":"(?:text|thinking|input_json)_delta",'
    rb'"(?:text|thinking|partial_json)":' + STRING + rb"\}"
)
DATA = re.compile(rb"(?:\A|\n)data: ?(\{[^\n]*)")
CHOICES, BLOCK_EVENTS = b'"choices"', b'"content_block_'
# Without any of these in the bytes, a chat has no output but content.
REASONING_KEY = b'"reasoning'
OTHER_KEYS = (
    b'"refusal"', b'"arguments"', b'"tool_calls"', b'"logprobs":{', b'"logprobs": {',
    b'"token_ids":[', b'"token_ids": [',
)  # fmt: skip
CONTENT, REASONING, TOOL_CALLS, BLOCKS = "content", "reasoning", "tool_calls", "blocks"
# Members of a delta with text, and its channel.
CHANNELS = {
    "content": CONTENT, "reasoning": REASONING, "reasoning_content": "reasoning_content",
    "refusal": "refusal",
}  # fmt: skip
BLOCK_TEXTS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


class OtherOutputError(Exception):
    """A stream has output that cannot be compared; the argument names it."""


class Part:
    """A piece of one text in an event."""

    __slots__ = ("channel", "key", "owner", "text")

    def __init__(self, channel: str, text: str, owner: dict[str, Any], key: str) -> None:
        self.channel = channel
        self.text = text
        self.owner = owner  # the JSON object with the text
        self.key = key  # empty: a beginning or an end, which is not cut


class OutputReader:
    """Finds the output in the events of one stream."""

    __slots__ = ("_messages", "call")

    def __init__(self, *, messages: bool, call: int = -1) -> None:
        self._messages = messages
        self.call = call  # index of the last tool call

    def texts(self, events: bytes) -> dict[str, str]:
        """Return the text of each channel in whole events."""
        if self._messages:
            blocks = BLOCK_TEXT.findall(events)
            if blocks and len(blocks) == events.count(BLOCK_EVENTS):
                return {BLOCKS: unescaped(blocks)}
            return self._read(events)
        if not any(key in events for key in OTHER_KEYS):
            if REASONING_KEY not in events:
                return {CONTENT: unescaped(CONTENT_TEXT.findall(events))}
            texts: dict[bytes, list[bytes]] = {}
            for key, text in TEXT.findall(events):
                texts.setdefault(b"content" if key == b"text" else key, []).append(text)
            return {key.decode(): unescaped(each) for key, each in texts.items()}
        arguments = ARGUMENTS.findall(events)
        if arguments and len(arguments) == events.count(CHOICES):
            calls = {index for index, _ in arguments}
            if calls == {b"%d" % self.call}:
                return {TOOL_CALLS: unescaped([text for _, text in arguments])}
        return self._read(events)

    def _read(self, events: bytes) -> dict[str, str]:
        found: dict[str, list[str]] = {}
        for data in DATA.findall(events):
            for part in self.parts(parsed(data)):
                found.setdefault(part.channel, []).append(part.text)
        return {channel: "".join(texts) for channel, texts in found.items()}

    def parts(self, event: dict[str, Any]) -> list[Part]:
        """Return the output in an event, in order."""
        try:
            return parts_of_message(event) if self._messages else self._parts_of_chat(event)
        except (AttributeError, TypeError):  # no object where one is expected
            raise OtherOutputError("data") from None

    def _parts_of_chat(self, event: dict[str, Any]) -> list[Part]:
        found: list[Part] = []
        for choice in event.get("choices") or ():
            if choice.get("logprobs") or choice.get("token_ids"):
                raise OtherOutputError("logprobs" if choice.get("logprobs") else "token_ids")
            if text := choice.get("text"):
                found.append(Part(CONTENT, text, choice, "text"))
            delta = choice.get("delta") or {}
            for name, value in delta.items():
                if not value or name == "role":
                    continue
                if name == TOOL_CALLS:
                    for call in value:
                        found += self._parts_of_call(call)
                elif name in CHANNELS and isinstance(value, str):
                    found.append(Part(CHANNELS[name], value, delta, name))
                else:
                    raise OtherOutputError(name)
        return found

    def _parts_of_call(self, call: dict[str, Any]) -> list[Part]:
        function, found, index = call.get("function") or {}, [], call.get("index")
        name, arguments = function.get("name"), function.get("arguments")
        if name or call.get("id"):
            if not isinstance(index, int):
                raise OtherOutputError(TOOL_CALLS)
            self.call = index
            found.append(Part(TOOL_CALLS, f"[{index} {name}]", call, ""))
        if arguments:
            if index != self.call or not isinstance(arguments, str):
                raise OtherOutputError(TOOL_CALLS)
            found.append(Part(TOOL_CALLS, arguments, function, "arguments"))
        return found


def parts_of_message(event: dict[str, Any]) -> list[Part]:
    """Return the output in an event of `/v1/messages`: none or one part."""
    kind, index = event.get("type"), event.get("index")
    if kind == "content_block_delta":
        delta = event.get("delta") or {}
        key = BLOCK_TEXTS.get(str(delta.get("type")), "")
        if key:
            return [Part(BLOCKS, delta.get(key) or "", delta, key)]
        if delta.get("type") == "signature_delta":  # random
            return [Part(BLOCKS, f"[{index} signature]", event, "")]
        raise OtherOutputError(str(delta.get("type")))
    if kind == "content_block_start":
        block = event.get("content_block") or {}
        name = block.get("name") or ""
        texts = [block.get(key) for key in ("text", "thinking", "input", "content")]
        if any(texts):
            raise OtherOutputError(str(block.get("type")))
        return [Part(BLOCKS, f"[{index} {block.get('type')} {name}]", event, "")]
    if kind == "content_block_stop":
        return [Part(BLOCKS, f"[{index} end]", event, "")]
    return []


def parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON object of an event."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise OtherOutputError("data") from None
    if not isinstance(event, dict):
        raise OtherOutputError("data")
    return event


def unescaped(texts: list[bytes]) -> str:
    """Return JSON strings, without their quotes, as one text."""
    try:
        text: str = orjson.loads(b'"%b"' % b"".join(texts))
    except orjson.JSONDecodeError:
        raise OtherOutputError("text") from None
    return text


def without_known(parts: list[tuple[Part, int]], event: dict[str, Any]) -> bytes:
    """Return an event's JSON without the first characters of its parts, as many as given."""
    for part, known in parts:
        if not part.key:
            if known:  # the client has the id of its first worker
                for name in ("id", "type"):
                    part.owner.pop(name, None)
                (part.owner.get("function") or {}).pop("name", None)
        elif known < len(part.text) or part.key == "text":
            part.owner[part.key] = part.text[known:]
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

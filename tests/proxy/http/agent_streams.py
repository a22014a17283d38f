"""Streams of reasoning, text and tool calls, as vLLM writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

# What a token adds: to "reasoning", "content" or "arguments", or the "name" of the next call.
Token = tuple[str, str]
USAGE = {"prompt_tokens": 7, "completion_tokens": 99, "total_tokens": 106}


def whole(tokens: Sequence[Token]) -> list[list[str]]:
    """Return the kinds of output in order, with their texts; a call is a name and arguments."""
    found: list[list[str]] = []
    for kind, text in tokens:
        if kind == "name":
            found.append([kind, text, ""])
        elif kind == "arguments":
            found[-1][2] += text
        elif found and found[-1][0] == kind:
            found[-1][1] += text
        else:
            found.append([kind, text])
    return [each for each in found if any(each[1:])]


def delta_of(tokens: Sequence[Token], call: int, run: str) -> dict[str, Any]:
    """Return the delta of these tokens after this many calls."""
    delta: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for kind, text in tokens:
        if kind in ("reasoning", "content"):
            delta[kind] = delta.get(kind, "") + text
            continue
        if kind == "name":
            call += 1
            named = {"id": f"call-{run}-{call}", "type": "function", "index": call - 1}
            calls.append({**named, "function": {"name": text}})
        elif calls:
            function = calls[-1]["function"]
            function["arguments"] = function.get("arguments", "") + text
        else:
            calls.append({"index": call - 1, "function": {"arguments": text}})
    return {**delta, "tool_calls": calls} if calls else delta


def deltas(tokens: Sequence[Token], first: int, run: str) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a server that gets this many tokens at once."""
    parts = [tokens[:first], *([token] for token in tokens[first:])]
    for number, part in enumerate(parts):
        before = tokens[: 0 if not number else first + number - 1]
        if part:
            yield delta_of(part, sum(kind == "name" for kind, _ in before), run)


def chat_events(tokens: Sequence[Token], first: int = 0, run: str = "a") -> list[bytes]:
    """Return the events of a chat; the last has no tokens."""
    calls = any(kind == "name" for kind, _ in tokens)
    events = [chat_event({"role": "assistant", "content": ""})]
    events += map(chat_event, deltas(tokens, first, run))
    events.append(chat_event({}, "tool_calls" if calls else "stop"))
    return [*events, data({"id": "c", "choices": [], "usage": USAGE}), b"data: [DONE]\n\n"]


def chat_event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return data({"id": "c", "object": "chunk", "model": "m", "choices": [choice]})


def data(event: dict[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def message_events(tokens: Sequence[Token], first: int = 0, run: str = "a") -> list[bytes]:
    """Return the events of a message."""
    stream = b"".join(message_steps(tokens, first, run))
    return [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]


def message_steps(tokens: Sequence[Token], first: int = 0, run: str = "a") -> list[bytes]:
    """Return the beginning of a message, the events of each delta of the chat, and the end.

    vLLM makes them from the chat's.
    """
    start = {"id": "c", "type": "message", "role": "assistant", "content": [], "stop_reason": None}
    blocks = Blocks(run)
    blocks.add("message_start", message=start)
    steps = [blocks.taken()]
    for delta in deltas(tokens, first, run):
        blocks.text("thinking", delta.get("reasoning"))
        blocks.text("text", delta.get("content"))
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                blocks.begin("tool_use", id=call["id"], name=function["name"], input={})
            if text := function.get("arguments"):
                blocks.delta("input_json_delta", partial_json=text)
        steps.append(blocks.taken())
    blocks.end()
    reason = "tool_use" if any(kind == "name" for kind, _ in tokens) else "end_turn"
    ends = {"stop_reason": reason, "stop_sequence": None}
    blocks.add("message_delta", delta=ends, usage={"input_tokens": 7, "output_tokens": 99})
    blocks.add("message_stop")
    return [*steps, blocks.taken()]


class Blocks:
    def __init__(self, run: str) -> None:
        self._events: list[bytes] = []
        self._run = run
        self._kind = ""
        self._index = -1

    def add(self, kind: str, **fields: Any) -> None:
        self._events.append(f"event: {kind}\n".encode() + data({"type": kind, **fields}))

    def taken(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return b"".join(events)

    def begin(self, kind: str, **fields: Any) -> None:
        self.end()
        self._kind = kind
        self._index += 1
        block = {"type": kind, **fields}
        self.add("content_block_start", content_block=block, index=self._index)

    def text(self, kind: str, text: str | None) -> None:
        if text:
            if self._kind != kind:
                self.begin(kind, **{kind: ""})
            self.delta(f"{kind}_delta", **{kind: text})

    def delta(self, kind: str, **fields: Any) -> None:
        self.add("content_block_delta", delta={"type": kind, **fields}, index=self._index)

    def end(self) -> None:
        if self._kind == "thinking":
            self.delta("signature_delta", signature=f"signed-{self._run}-{self._index}")
        if self._kind:
            self.add("content_block_stop", index=self._index)
        self._kind = ""


def read_chat(stream: bytes) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the output of a chat's stream as its client adds it up, and what else it got."""
    texts = {"reasoning": "", "content": ""}
    calls: dict[int, list[str]] = {}
    got: dict[str, Any] = {"ids": [], "finish": [], "roles": 0, "done": 0, "usage": []}
    for event in events_in(stream):
        got["done"] += event is None
        for choice in (event or {}).get("choices", ()):
            delta = choice["delta"]
            got["roles"] += "role" in delta
            got["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for kind in texts:
                texts[kind] += delta.get(kind) or ""
            for call in delta.get("tool_calls", ()):
                if call.get("id"):
                    assert call["index"] not in calls
                    got["ids"].append(call["id"])
                    calls[call["index"]] = ["name", call["function"]["name"], ""]
                calls[call["index"]][2] += call["function"].get("arguments", "")
        if event and event.get("usage"):
            got["usage"].append(event["usage"])
    found = [[kind, text] for kind, text in texts.items() if text]
    return found + [calls[index] for index in sorted(calls)], got


def read_message(stream: bytes) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the same of a message; its blocks begin and end once, in order."""
    found: list[list[str]] = []
    got: dict[str, Any] = {"ids": [], "finish": [], "roles": 0, "done": 0, "usage": []}
    open_block = -1
    for event in events_in(stream):
        assert event is not None
        kind = event["type"]
        got["roles"] += kind == "message_start"
        got["done"] += kind == "message_stop"
        if kind == "content_block_start":
            assert open_block == -1
            open_block = event["index"]
            assert open_block == len(found)
            block = event["content_block"]
            if block["type"] == "tool_use":
                got["ids"].append(block["id"])
                found.append(["name", block["name"], ""])
            else:
                found.append([{"thinking": "reasoning", "text": "content"}[block["type"]], ""])
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            delta = event["delta"]
            found[-1][-1] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            )
            got["ids"] += [delta["signature"]] if "signature" in delta else []
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            open_block = -1
        elif kind == "message_delta":
            got["finish"].append(event["delta"]["stop_reason"])
            got["usage"].append(event["usage"])
    assert open_block == -1
    return [each for each in found if any(each[1:])], got


def events_in(stream: bytes) -> Iterator[dict[str, Any] | None]:
    """Yield each event's JSON; None for [DONE]."""
    for event in stream.split(b"\n\n")[:-1]:
        text = event.split(b"data: ", 1)[1]
        yield None if text == b"[DONE]" else json.loads(text)

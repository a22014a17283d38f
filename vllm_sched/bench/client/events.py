"""Parse server-sent events with little work per token.

The process that measures time also reads every token. So a token event is recognised by a few
bytes; all other events are parsed as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from vllm_sched.bench.client.wire import excerpt
from vllm_sched.bench.results.outcome import Outcome

DONE = re.compile(rb"^data: ?\[DONE\]\s*\Z", re.MULTILINE)
PING = re.compile(rb"^event: ?ping *$", re.MULTILINE)


class EventStream:
    def __init__(self, outcome: Outcome, token_events: list[bytes] | None = None) -> None:
        """Append the events with tokens to `token_events`, if it is given."""
        self._outcome = outcome
        self._token_events = token_events
        self.cached_tokens: int | None = None  # of the prompt, if the server reports it
        self._rest = b""
        self._done = False

    @property
    def done(self) -> bool:
        """Return whether [DONE] has arrived; some servers send no empty line after it."""
        return self._done or DONE.search(self._rest) is not None

    def feed(self, chunk: bytes, now: float) -> None:
        if self._rest:
            chunk = self._rest + chunk
        if b"\r\n" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        *events, self._rest = chunk.split(b"\n\n")
        for event in events:
            # Written out, because a loop over the marks would dominate the cost.
            if (
                b'"choices":[{' in event
                and b'"usage":{' not in event
                and b'"role"' not in event
                and b'"delta":{}' not in event
            ):
                self._outcome.ticks.append(now)
                if self._token_events is not None:
                    self._token_events.append(event)
            elif event.startswith(b"data: [DONE]"):
                self._done = True
            elif event:
                self._feed_unusual(event, now)

    def _feed_unusual(self, event: bytes, now: float) -> None:
        payload = _payload(event)
        if payload is None:
            return
        if payload == b"[DONE]":
            self._done = True
            return
        message = _message(payload)
        usage = message.get("usage")
        # Some servers send the usage without choices, where most send an empty list.
        alone = isinstance(usage, dict) and "error" not in message
        choices = message.get("choices", [] if alone else None)
        if not (isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)):
            self._outcome.error = excerpt(payload)
            return
        if any(map(_carries_a_token, choices)):
            self._outcome.ticks.append(now)
            if self._token_events is not None:
                self._token_events.append(event)
        if isinstance(usage, dict):
            self._read_usage(usage)

    def _read_usage(self, usage: dict[str, Any]) -> None:
        outcome = self._outcome
        outcome.completed = _count(usage, "completion_tokens")
        outcome.prompt_tokens = _count(usage, "prompt_tokens") or outcome.prompt_tokens
        if isinstance(details := usage.get("prompt_tokens_details"), dict):
            self.cached_tokens = _count(details, "cached_tokens")


def _payload(event: bytes) -> bytes | None:
    """Return the data of an event; None for a keep-alive."""
    data = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(data).strip() if data and not PING.search(event) else None


def _message(payload: bytes) -> dict[str, Any]:
    """Return a JSON object, empty for any other text."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def text_of(events: Iterable[bytes]) -> str:
    """Return the text of events with tokens; invalid events have none."""
    return "".join(map(_text, events))


def _text(event: bytes) -> str:
    data = b"".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        choice = json.loads(data)["choices"][0]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return text if isinstance(text, str) else ""


def _count(usage: dict[str, Any], key: str) -> int:
    value = usage.get(key)
    return value if type(value) is int and value > 0 else 0


def _carries_a_token(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "text" in choice  # a completion; half a character gives an empty text
    content = {name: value for name, value in delta.items() if name != "role"}
    # With a role an empty text is only the opening; without one it is a token.
    return bool(content) and ("role" not in delta or any(content.values()))

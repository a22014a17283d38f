"""Server-sent events, read with as little work as will do.

Every token of every stream passes here, in the process that also keeps the time. So an event is
recognised as a token by a few of its bytes. The rare ones that might be something else, such as the
role that opens a chat's answer, or its end, are parsed.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from vllm_sched.bench.results.error_excerpt import excerpt

if TYPE_CHECKING:
    from vllm_sched.bench.results.outcome import Outcome

DONE = re.compile(rb"^data: ?\[DONE\]\s*\Z", re.MULTILINE)
PING = re.compile(rb"^event: ?ping *$", re.MULTILINE)


class EventStream:
    """Reads one response into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._done = False

    @property
    def done(self) -> bool:
        """Whether its last word has come, for which some servers write no empty line."""
        return self._done or DONE.search(self._rest) is not None

    def feed(self, chunk: bytes, now: float) -> None:
        """Take in what arrived at `now`."""
        if self._rest:
            chunk = self._rest + chunk
        if b"\r\n" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        *events, self._rest = chunk.split(b"\n\n")
        for event in events:
            # Spelt out: a loop over the marks costs more than all the rest.
            if (
                b'"choices":[{' in event
                and b'"usage":{' not in event
                and b'"role"' not in event
                and b'"delta":{}' not in event
            ):
                self._outcome.ticks.append(now)
            elif event.startswith(b"data: [DONE]"):
                self._done = True
            elif event:
                self._rare(event, now)

    def _rare(self, event: bytes, now: float) -> None:
        data = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
        if not data or PING.search(event):
            return  # to keep the connection open
        payload = b"\n".join(data).strip()
        if payload == b"[DONE]":
            self._done = True
            return
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            message = {}
        # Some servers tell the usage with no choices at all, where most have an empty list.
        alone = isinstance(message.get("usage"), dict) and "error" not in message
        choices = message.get("choices", [] if alone else None)
        if not (isinstance(choices, list) and all(isinstance(each, dict) for each in choices)):
            self._outcome.error = excerpt(payload)
            return
        if any(map(_carries_a_token, choices)):
            self._outcome.ticks.append(now)
        if isinstance(usage := message.get("usage"), dict):
            self._outcome.completed = _count(usage, "completion_tokens")
            self._outcome.prompt_tokens = (
                _count(usage, "prompt_tokens") or self._outcome.prompt_tokens
            )


def _count(usage: dict[str, Any], key: str) -> int:
    value = usage.get(key)
    return value if type(value) is int and value > 0 else 0


def _carries_a_token(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "text" in choice  # a completion; the text may be half a character, so empty
    said = {name: value for name, value in delta.items() if name != "role"}
    # Beside a role an empty text is a greeting; alone it is a token that shows later.
    return bool(said) and ("role" not in delta or any(said.values()))

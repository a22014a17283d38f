"""The key of a request's session: a hash of an id with tenant and model.

It is a hint: `Session.may_extend` compares prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from proxy.core.request.client_fields import PREVIOUS

# The most specific first.
HEADERS = (
    b"x-session-id",  # also OpenCode
    b"x-claude-code-session-id",
    b"thread-id",  # Codex
    b"thread_id",
    b"session-id",
    b"session_id",
    b"x-session-affinity",  # OpenCode
    b"x-opencode-session",
)
AGENT = b"x-claude-code-agent-id"  # sub-agents share their session
FIELD = "prompt_cache_key"
MIN_MESSAGES = 3  # fewer: a first turn
MAX_LOOKED_AT = 8  # messages and parts
MAX_TEXT = 512  # characters at the end


def id_in_headers(special: Mapping[bytes, bytes]) -> bytes:
    """Return the session's id, or nothing."""
    for name in HEADERS:
        if value := special.get(name):
            agent = special.get(AGENT)
            return value if agent is None else b"%b %b" % (value, agent)
    return b""


def id_in_body(fields: Mapping[str, Any]) -> bytes:
    """Return an id, or else the first user message's end."""
    if FIELD in fields:
        named = fields[FIELD]
        if type(named) is str and named:
            return named.encode(errors="replace")
    messages = fields.get("messages") or fields.get("input")
    if type(messages) is not list or len(messages) < MIN_MESSAGES:
        return b""
    for message in messages[:MAX_LOOKED_AT]:
        if type(message) is dict and message.get("role") == "user":
            return b"\0" + _text_of(message.get("content")).encode(errors="replace")
    return b""


def previous_response(fields: Mapping[str, Any]) -> bytes:
    previous = fields.get(PREVIOUS)
    return previous.encode(errors="replace") if type(previous) is str else b""


def session_key(owner: str, model: str, session_id: bytes) -> int:
    if not session_id:
        return 0
    named = b"\0".join((owner.encode(), model.encode(errors="replace"), session_id))
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "big")


def _text_of(content: Any) -> str:
    if type(content) is str:
        return content[-MAX_TEXT:]
    if type(content) is not list:
        return ""
    parts = (part.get("text") for part in content[:MAX_LOOKED_AT] if type(part) is dict)
    return "".join(text[-MAX_TEXT:] for text in parts if type(text) is str)

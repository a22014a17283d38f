"""Which requests go on from their text alone, and the body that another worker gets.

The text that the client has becomes the end of the prompt, or the last message.
"""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.model.route_table import PromptFields
from proxy.core.request.json_edit import edit_members, members

# Of the whole output, or the end of the prompt.
NOT_BY_TEXT = (
    "response_format", "structured_outputs", "thinking_token_budget", "truncate_prompt_tokens",
    "continue_final_message",
)  # fmt: skip
TOOL_CHOICES = None, "auto", "none"  # the others constrain the output from its beginning
LIMITS = "max_tokens", "max_completion_tokens", "min_tokens"


def why_not_by_text(body: bytes) -> str:
    """Return the field that prevents it; empty if none does.

    The body is one that `why_not_continued` accepts.
    """
    fields: dict[str, Any] = orjson.loads(body)
    for name in NOT_BY_TEXT:
        if fields.get(name):
            return name
    if not isinstance(fields.get("prompt", ""), str):
        return "prompt"
    if fields.get("tool_choice") not in TOOL_CHOICES:
        return "tool_choice"
    if any(tool.get("function", {}).get("strict") for tool in fields.get("tools") or ()):
        return "tools"
    options = fields.get("stream_options") or {}
    return "stream_options" if options.get("continuous_usage_stats") else ""


class TextSoFar:
    """The body of a request that goes on behind the client's text."""

    __slots__ = ("body", "space", "tokens")

    def __init__(self, body: bytes, space: str = "", tokens: int = 0) -> None:
        self.body = body
        self.space = space  # at the end of the text; the body lacks it
        self.tokens = tokens  # of the text


def with_text(body: bytes, shape: PromptFields, text: str, tokens: int) -> TextSoFar | None:
    """Return the body that goes on behind a text of so many tokens; None if none may follow."""
    kept = text
    if shape is PromptFields.CHAT:  # templates remove space at the end of a message
        kept = text.rstrip()
        if not kept:
            return TextSoFar(body, text)
        tokens -= kept != text  # the space is generated again
    there = {member.name.decode(): body[member.value : member.end] for member in members(body)}
    new: dict[str, bytes | None] = {}
    for name in LIMITS:
        limit = orjson.loads(there.get(name, b"null"))
        if limit is not None:
            left = int(limit) - tokens
            if left <= 0 and name != "min_tokens":
                return None
            new[name] = b"%d" % max(left, 0)
    if shape is PromptFields.CHAT:
        message = orjson.dumps({"role": "assistant", "content": kept})
        new["messages"] = b"%b,%b]" % (there["messages"][:-1], message)
        new |= {"continue_final_message": b"true", "add_generation_prompt": b"false"}
    else:
        new["prompt"] = there["prompt"][:-1] + orjson.dumps(kept)[1:]
    return TextSoFar(edit_members(body, new), text[len(kept) :], tokens)

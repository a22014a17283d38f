"""Which requests go on from their text alone, and the body that another worker gets.

The text that the client has becomes the end of the prompt, or the last message.
"""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.model.route_table import PromptFields
from proxy.core.request.json_edit import edit_members, members
from proxy.core.request.sizing import COMPLETION_OUTPUT
from proxy.core.request.token_estimate import parse_count

# Of the whole output, or the end of the prompt.
NOT_BY_TEXT = (
    "response_format", "structured_outputs", "thinking_token_budget", "truncate_prompt_tokens",
    "continue_final_message", "include_stop_str_in_output",
)  # fmt: skip
UNCONSTRAINED = {"type": "text"}  # as `response_format`
NOT_DISABLED = "add_generation_prompt", "include_reasoning"
TOOL_CHOICES = None, "auto", "none"  # the others constrain the output from its beginning
NULL = b"null"
LIMIT_FIELD, CHAT_LIMIT_FIELD, LEAST_FIELD = "max_tokens", "max_completion_tokens", "min_tokens"


def why_not_by_text(body: bytes, shape: PromptFields) -> str:
    """Return the field that prevents it; empty if none does.

    `why_not_continued` has accepted the body. Workers ignore the fields of other routes.
    """
    fields: dict[str, Any] = orjson.loads(body)
    for name in NOT_BY_TEXT:
        if fields.get(name) and fields[name] != UNCONSTRAINED:
            return name
    options = fields.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        return "stream_options"
    if shape is not PromptFields.CHAT:
        return "" if isinstance(fields.get("prompt"), str) else "prompt"
    messages, tools = fields.get("messages"), fields.get("tools")
    if not (messages and isinstance(messages, list)):
        return "messages"
    for name in NOT_DISABLED:
        if fields.get(name) is False:
            return name
    if fields.get("tool_choice") not in TOOL_CHOICES:
        return "tool_choice"
    return "tools" if isinstance(tools, list) and any(map(is_strict, tools)) else ""


def is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


class TextSoFar:
    """The body of a request that goes on behind the client's text."""

    __slots__ = ("body", "space", "tokens")

    def __init__(self, body: bytes, space: str = "", tokens: int = 0) -> None:
        self.body = body
        self.space = space  # at the end of the text; the body lacks it
        self.tokens = tokens  # of the text


def with_text(body: bytes, shape: PromptFields, text: str, tokens: int) -> TextSoFar | None:
    """Return the body that goes on behind a text; None if no token may follow."""
    kept, is_chat = text, shape is PromptFields.CHAT
    if is_chat:  # templates remove space at the end of a message
        kept = text.rstrip()
        if not kept:
            return TextSoFar(body, text)
        tokens -= kept != text  # the space is generated again
    values = {member.name.decode(): body[member.value : member.end] for member in members(body)}
    name = (
        CHAT_LIMIT_FIELD if is_chat and values.get(CHAT_LIMIT_FIELD, NULL) != NULL else LIMIT_FIELD
    )
    limit = parse_count(orjson.loads(values.get(name, NULL)))
    if limit is None and not is_chat:
        limit = COMPLETION_OUTPUT
    new: dict[str, bytes | None] = {}
    if limit is not None:
        if limit <= tokens:
            return None
        new[name] = b"%d" % (limit - tokens)
    min_tokens = parse_count(orjson.loads(values.get(LEAST_FIELD, NULL)))
    if min_tokens is not None:
        new[LEAST_FIELD] = b"%d" % max(min_tokens - tokens, 0)
    if is_chat:
        message = orjson.dumps({"role": "assistant", "content": kept})
        new["messages"] = b"%b,%b]" % (values["messages"][:-1], message)
        new |= {"continue_final_message": b"true", "add_generation_prompt": b"false"}
    else:
        new["prompt"] = values["prompt"][:-1] + orjson.dumps(kept)[1:]
    return TextSoFar(edit_members(body, new), text[len(kept) :], tokens)

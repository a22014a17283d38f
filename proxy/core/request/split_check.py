"""Whether a request may be served in two legs, prefill on one worker and decode on another.

It may where both legs read the same prompt to the same tokens, and where what the client is told
comes from the decode leg alone. What is in doubt is served whole: that is always right.
"""

from __future__ import annotations

from typing import Any

from proxy.core.model.route_table import route_names
from proxy.core.model.types import RequestInfo
from proxy.core.request.token_estimate import count

SPLITTABLE = route_names(lambda route: route.may_be_split)
SAMPLES = ("n", "best_of")
CHAT, RESPONSES = "chat/completions", "responses"


def whole_because(ask: RequestInfo, fields: dict[str, Any]) -> str:
    """Say why a request can't be split, in a word that may be a label; empty if it can."""
    if ask.route not in SPLITTABLE:
        return "route"
    if ask.samples != 1:
        return "samples"
    if ask.output_tokens is not None and ask.output_tokens <= 1:
        return "one_token"
    if ask.pinned:
        return "stored"
    if NOTED.isdisjoint(fields):  # nearly always
        return ""
    # Whatever is not surely one: two would share parameters that are for one use.
    if any(count(said) != 1 for name in SAMPLES if (said := fields.get(name)) is not None):
        return "samples"
    if fields.get("background"):
        return "stored"
    for name, why in WHOLE:
        value = fields.get(name)
        if value is not None and value is not False:  # 0 prompt_logprobs are some
            return why
    if fields.get("truncation") == "auto":
        return "truncated"
    if ask.route == RESPONSES:
        if fields.get(OWN_ID) is not None:
            return "own_id"
        if _runs_tools(fields.get("tools")):
            return "tools"
    if ask.route != CHAT and _must_call(fields.get("tool_choice")):
        return "tools"
    return ""


# Fields that are enough, and what to call them.
WHOLE = (
    ("use_beam_search", "beam_search"),
    ("prompt_logprobs", "prompt_logprobs"),
    ("echo", "echo"),
    ("truncate_prompt_tokens", "truncated"),  # to what is left beside the output, which differs
    ("prompt_embeds", "not_text"),
    ("kv_transfer_params", "client"),
    ("ec_transfer_params", "client"),
)
# By which this route's workers know a request; where both legs need one of ours, it is not this.
OWN_ID = "request_id"
NOTED = frozenset(
    [
        *(*SAMPLES, "background", "truncation", "tools", "tool_choice", OWN_ID),
        *(name for name, _ in WHOLE),
    ]
)


def _runs_tools(tools: object) -> bool:
    """Whether a worker would call tools itself, and go on from there in turns of its own."""
    if type(tools) is not list:
        return tools is not None
    return any(type(tool) is not dict or tool.get("type") != "function" for tool in tools)


def _must_call(choice: object) -> bool:
    """Whether an answer has to call a tool: some routes fail to read the first token of a call."""
    kind = choice.get("type") if type(choice) is dict else choice
    return kind not in (None, "auto", "none")

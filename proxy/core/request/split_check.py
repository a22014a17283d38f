"""Whether a request may have a prefill leg and a decode leg on two workers.

Both legs must tokenize the prompt alike, and the whole response must come from the decode leg. If
in doubt, a request stays whole.
"""

from __future__ import annotations

from typing import Any

from proxy.core.model.route_table import route_names
from proxy.core.model.types import RequestInfo
from proxy.core.request.token_estimate import parse_count

SPLITTABLE = route_names(lambda route: route.may_be_split)
SAMPLES = ("n", "best_of")
CHAT, RESPONSES = "chat/completions", "responses"


def why_not_split(ask: RequestInfo, fields: dict[str, Any]) -> str:
    """Return why a request can't be split, as a metric label; "" if it can."""
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
    # Anything but one sample: two would share single-use parameters.
    if any(parse_count(value) != 1 for name in SAMPLES if (value := fields.get(name)) is not None):
        return "samples"
    if fields.get("background"):
        return "stored"
    for name, why in WHOLE:
        value = fields.get(name)
        if value is not None and value is not False:  # 0 prompt_logprobs still adds output
            return why
    if fields.get("truncation") == "auto":
        return "truncated"
    if ask.route == RESPONSES:
        if fields.get(OWN_ID) is not None:
            return "own_id"
        if _runs_tools(fields.get("tools")):
            return "tools"
    if ask.route != CHAT and _is_call_forced(fields.get("tool_choice")):
        return "tools"
    return ""


# Fields that forbid a split, with labels.
WHOLE = (
    ("use_beam_search", "beam_search"),
    ("prompt_logprobs", "prompt_logprobs"),
    ("echo", "echo"),
    ("truncate_prompt_tokens", "truncated"),  # depends on the output limit, which differs
    ("prompt_embeds", "not_text"),
    ("kv_transfer_params", "client"),
    ("ec_transfer_params", "client"),
)
# Identifies the response at the worker; the legs may need the router's id.
OWN_ID = "request_id"
NOTED = frozenset(
    [
        *(*SAMPLES, "background", "truncation", "tools", "tool_choice", OWN_ID),
        *(name for name, _ in WHOLE),
    ]
)


def _runs_tools(tools: object) -> bool:
    """Return whether a worker would run tools itself, in further turns."""
    if type(tools) is not list:
        return tools is not None
    return any(type(tool) is not dict or tool.get("type") != "function" for tool in tools)


def _is_call_forced(choice: object) -> bool:
    """Return whether a tool call is forced: some routes lose its first token."""
    kind = choice.get("type") if type(choice) is dict else choice
    return kind not in (None, "auto", "none")

"""Whether a request may have a prefill leg and a decode leg on two workers.

Both legs must tokenize the prompt alike, and the whole response must come from the decode leg. If
in doubt, a request stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from proxy.core.model.route_table import route_names
from proxy.core.model.types import RequestInfo
from proxy.core.request.token_estimate import parse_count

SPLITTABLE = route_names(lambda route: route.may_be_split)
CHAT, RESPONSES = frozenset(["chat/completions"]), frozenset(["responses"])


def why_not_split(info: RequestInfo, fields: dict[str, Any]) -> str:
    """Return why a request can't be split, as a metric label; "" if it can."""
    if info.route not in SPLITTABLE:
        return "route"
    if info.samples != 1:
        return "samples"
    if info.output_tokens is not None and info.output_tokens <= 1:
        return "one_token"
    if info.pinned:
        return "stored"
    if NAMES.isdisjoint(fields):  # nearly always
        return ""
    for name, routes, forbids, why in FIELDS:
        value = fields.get(name)
        if value is not None and info.route in routes and forbids(value):
            return why
    return ""


def _is_given(value: object) -> bool:
    return value is not False  # 0 `prompt_logprobs` still adds output


def _is_not_one(samples: object) -> bool:
    """Return whether there may be several samples, which would share single-use parameters."""
    return parse_count(samples) != 1


def _is_auto(truncation: object) -> bool:
    return truncation == "auto"


def _runs_tools(tools: object) -> bool:
    """Return whether a worker would run tools itself, in further turns."""
    if type(tools) is not list:
        return True
    return any(type(tool) is not dict or tool.get("type") != "function" for tool in tools)


def _is_call_forced(choice: object) -> bool:
    """Return whether a tool call is forced: some routes lose its first token."""
    kind = choice.get("type") if type(choice) is dict else choice
    return kind not in (None, "auto", "none")


# The fields that forbid a split: on which routes, with which values but null, and the label.
FIELDS: Sequence[tuple[str, frozenset[str], Callable[[Any], bool], str]] = (
    ("n", SPLITTABLE, _is_not_one, "samples"),
    ("best_of", SPLITTABLE, _is_not_one, "samples"),
    ("background", SPLITTABLE, bool, "stored"),
    ("use_beam_search", SPLITTABLE, _is_given, "beam_search"),
    ("prompt_logprobs", SPLITTABLE, _is_given, "prompt_logprobs"),
    ("echo", SPLITTABLE, _is_given, "echo"),
    # Depends on the output limit, which differs.
    ("truncate_prompt_tokens", SPLITTABLE, _is_given, "truncated"),
    ("prompt_embeds", SPLITTABLE, _is_given, "not_text"),
    ("kv_transfer_params", SPLITTABLE, _is_given, "client"),
    ("ec_transfer_params", SPLITTABLE, _is_given, "client"),
    ("truncation", SPLITTABLE, _is_auto, "truncated"),
    # Identifies the response at the worker; the legs may need the router's id.
    ("request_id", RESPONSES, _is_given, "own_id"),
    ("tools", RESPONSES, _runs_tools, "tools"),
    ("tool_choice", SPLITTABLE - CHAT, _is_call_forced, "tools"),
)
NAMES = frozenset([field[0] for field in FIELDS])

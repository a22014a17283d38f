"""The bodies of the two legs of a hand-over: the client's body with a few fields changed."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from proxy.core.model.route_table import BY_NAME
from proxy.core.model.types import RequestInfo
from proxy.core.request.json_edit import edit_members, members
from proxy.transfer.types import NOTHING, Connector, Fields, Pair, PrefillResult

ONE, FALSE = b"1", b"false"
THINKING = "thinking"
# Routes with the request id in the body instead of X-Request-Id, and the prefix of response ids.
IDS = {"responses": ("request_id", "resp_")}
PREFILL: Mapping[str, Fields] = {
    # A worker computes at least one token. The decode worker computes the same token again.
    name: {**dict.fromkeys(route.output_limits, ONE), "stream": FALSE, "stream_options": None}
    | ({"store": FALSE} if route.stores else {})
    for name, route in BY_NAME.items()
    if route.may_be_split
}


def prefill_body(connector: Connector, pair: Pair, info: RequestInfo, body: bytes) -> bytes:
    fields = {**PREFILL[info.route], **_id(connector, pair, info), **connector.prefill(pair)}
    if info.has_min_tokens:
        fields["min_tokens"] = ONE
    if info.route == "messages" and not connector.is_marked and _may_think_long(info, body):
        fields[THINKING] = None
    return edit_members(body, fields, info.field_names)


def _may_think_long(info: RequestInfo, body: bytes) -> bool:
    """Return whether a message enables thinking with a token budget.

    vLLM refuses a budget above the output limit. The prefill leg can leave the budget out, because
    it does not change the prompt; other values of `thinking` do.
    """
    if info.field_names is not None and THINKING not in info.field_names:
        return False
    name = THINKING.encode()
    values = [body[member.value : member.end] for member in members(body) if member.name == name]
    try:
        thinking = orjson.loads(values[-1]) if values else None
    except orjson.JSONDecodeError:
        return False
    return isinstance(thinking, dict) and thinking.get("type") == "enabled"


def decode_body(
    connector: Connector, pair: Pair, result: PrefillResult, info: RequestInfo, body: bytes
) -> bytes:
    fields = connector.decode(pair, result)
    if id_fields := _id(connector, pair, info):
        fields = {**fields, **id_fields}
    return edit_members(body, fields, info.field_names) if fields else body


def _id(connector: Connector, pair: Pair, info: RequestInfo) -> Fields:
    if info.route not in IDS or (number := connector.request_id(pair)) is None:
        return NOTHING
    name, start = IDS[info.route]
    return {name: orjson.dumps(start + number.decode())}

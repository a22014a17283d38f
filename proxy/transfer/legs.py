"""The two bodies of a hand-over, written into the client's own: all other bytes stay."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from proxy.core.model.route_table import BY_NAME
from proxy.core.model.types import RequestInfo
from proxy.core.request.json_edit import members, spliced
from proxy.transfer.types import NOTHING, Connector, Fields, Pair, PrefillResult

ONE, FALSE = b"1", b"false"
THINKING = "thinking"
# Routes whose workers know a request by a member of its body, and not by X-Request-Id; and how the
# ids of their answers begin.
IDS = {"responses": ("request_id", "resp_")}
PREFILL: Mapping[str, Fields] = {
    # A worker computes at least one token. The decode worker computes the same token again.
    name: {**dict.fromkeys(route.output_limits, ONE), "stream": FALSE, "stream_options": None}
    | ({"store": FALSE} if route.stores else {})
    for name, route in BY_NAME.items()
    if route.may_be_split
}


def prefill_body(connector: Connector, pair: Pair, ask: RequestInfo, body: bytes) -> bytes:
    """Write the prefill leg's."""
    fields = {**PREFILL[ask.route], **_id(connector, pair, ask), **connector.prefill(pair)}
    if ask.least_output:
        fields["min_tokens"] = ONE
    if ask.route == "messages" and not connector.is_marked and _may_think_long(ask, body):
        fields[THINKING] = None
    return spliced(body, fields, ask.said)


def _may_think_long(ask: RequestInfo, body: bytes) -> bool:
    """Whether a message says for how many tokens it may be thought about: for more than one.

    vLLM refuses that beside a limit of one token. It is a matter of the answer alone; to think not
    at all, or as the model likes, is one of the prompt.
    """
    if ask.said is not None and THINKING not in ask.said:
        return False
    name = THINKING.encode()
    said = [body[each.value : each.end] for each in members(body) if each.name == name]
    try:
        thinking = orjson.loads(said[-1]) if said else None
    except orjson.JSONDecodeError:
        return False
    return isinstance(thinking, dict) and thinking.get("type") == "enabled"


def decode_body(
    connector: Connector, pair: Pair, taken: PrefillResult, ask: RequestInfo, body: bytes
) -> bytes:
    """Write the decode leg's."""
    fields = connector.decode(pair, taken)
    if named := _id(connector, pair, ask):
        fields = {**fields, **named}
    return spliced(body, fields, ask.said) if fields else body


def _id(connector: Connector, pair: Pair, ask: RequestInfo) -> Fields:
    """Have both legs go by one id where that decides whose blocks go where."""
    if ask.route not in IDS or (number := connector.request_id(pair)) is None:
        return NOTHING
    name, start = IDS[ask.route]
    return {name: orjson.dumps(start + number.decode())}

"""The request bodies of both legs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.model.route_table import BY_NAME, route_names
from proxy.core.model.types import Usage
from proxy.transfer.legs import decode_body, prefill_body
from proxy.transfer.registry import CONNECTORS
from proxy.transfer.types import PrefillResult, usage_of
from tests.present import present
from tests.proxy.core.making import make_info
from tests.proxy.transfer.making import PAIR, make

BODY = b'{"prompt":"a \\u00e9 \\"max_tokens\\": 9","max_tokens":7, "temperature":0.70, "x":null}'
NAMES, MARKED_CONNECTORS = tuple(CONNECTORS), ("nixl", "mooncake")
SPLIT = sorted(route_names(lambda route: route.may_be_split))


def prefill(route: str, body: bytes, *, has_minimum: bool = False, connector: str = "nixl") -> Any:
    info = make_info(100)
    info.route, info.has_min_tokens = route, has_minimum
    return json.loads(prefill_body(make(connector), PAIR, info, body))


@pytest.mark.parametrize("route", SPLIT)
def test_prefill_leg_writes_one_token_without_a_stream(route: str) -> None:
    body = b'{"stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"model":"m"}'
    leg = prefill(route, body)
    assert all(leg[name] == 1 for name in BY_NAME[route].output_limits)
    assert leg["stream"] is False
    assert "stream_options" not in leg
    assert leg["model"] == "m"
    assert leg["kv_transfer_params"]["do_remote_decode"] is True


def test_prefill_leg_does_not_store_the_response() -> None:
    assert prefill("responses", b'{"input":"x"}')["store"] is False
    assert "store" not in prefill("completions", b'{"prompt":"x"}')


@pytest.mark.parametrize(("has_minimum", "expected"), [(True, 1), (False, None)])
def test_min_tokens_of_a_prefill_leg_is_one(has_minimum: bool, expected: int | None) -> None:
    body = b'{"prompt":"x","min_tokens":5}' if has_minimum else b'{"prompt":"x"}'
    assert prefill("completions", body, has_minimum=has_minimum).get("min_tokens") == expected


@pytest.mark.parametrize("connector", NAMES)
@pytest.mark.parametrize(
    ("thinking", "stays"),
    [
        ('"thinking":{"type":"enabled","budget_tokens":2048},', False),
        ('"th\\u0069nking":{"budget_tokens":2048,"type":"enabled"},', False),
        ('"thinking":{"type":"disabled"},"thinking":{"type":"enabled","budget_tokens":1},', False),
        ('"thinking":{"type":"disabled"},', True),  # a template renders another prompt without it
        ('"thinking":{"type":"adaptive"},', True),
        ('"thinking":{"type":"enabled"},"thinking":{"type":"disabled"},', True),
        ('"thinking":"enabled",', True),
        ('"thinking":null,', True),
    ],
)
def test_thinking_budget_is_removed_from_unmarked_prefill_legs(
    connector: str, thinking: str, stays: bool
) -> None:
    """Without a marked leg, vLLM refuses thinking with one token."""
    rest = '"messages":[{"role":"user","content":"thinking"}],"max_tokens":4096}'
    body = ("{" + thinking + rest).encode()
    leg = prefill("messages", body, connector=connector)
    sent = json.loads(body)
    assert ("thinking" in leg) == (stays or connector in MARKED_CONNECTORS)
    assert leg.get("thinking", sent["thinking"]) == sent["thinking"]
    assert leg["messages"] == sent["messages"]
    assert make(connector).is_marked == (connector in MARKED_CONNECTORS)


def test_decode_leg_is_the_clients_body_with_parameters() -> None:
    nixl = make("nixl")
    leg = decode_body(
        nixl, PAIR, PrefillResult(b'{"do_remote_prefill":true}'), make_info(100), BODY
    )
    assert leg == BODY[:-1] + b',"kv_transfer_params":{"do_remote_prefill":true}}'
    assert decode_body(nixl, PAIR, PrefillResult(), make_info(100), BODY) is BODY


def test_client_transfer_params_are_replaced() -> None:
    """Such a request is served whole; this is a second guard."""
    body = b'{"kv_transfer_params":{"a":1},"prompt":"x","kv_transfer_params":{"b":2}}'
    leg = decode_body(make("nixl"), PAIR, PrefillResult(b'{"c":3}'), make_info(100), body)
    assert leg.count(b'{"c":3}') == 2
    assert b'"a"' not in leg


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"x"} \n',
        b'{"prompt":"a } b"}',
        b'{"prompt":"kv_transfer_params"}',
        b'{"prompt":"x","kv_transfer_params":null}',
        b'{"prompt":"x","kv\\u005ftransfer_params":null}',
        b'{"prompt":"x","n":{"a":{}}}',
    ],
)
def test_decode_leg_has_the_parameters_once(body: bytes) -> None:
    leg = decode_body(make("nixl"), PAIR, PrefillResult(b'{"c":3}'), make_info(100), body)
    pairs = json.loads(leg, object_pairs_hook=list)
    assert [value for name, value in pairs if name == "kv_transfer_params"] == [[("c", 3)]]
    sent = json.loads(body)
    sent.pop("kv_transfer_params", None)
    received = json.loads(leg)
    del received["kv_transfer_params"]
    assert received == sent


@pytest.mark.parametrize("route", SPLIT)
@pytest.mark.parametrize(
    ("connector", "settings", "paired"),
    [
        ("nixl", {"mode": "push"}, True),
        ("nixl", {}, False),
        ("shared-storage", {"path": "/kv"}, False),
    ],
)
def test_both_legs_share_an_id_if_the_connector_needs_it(
    route: str, connector: str, settings: dict[str, Any], paired: bool
) -> None:
    """Most routes use X-Request-Id; `responses` uses the body's id."""
    transfer, info = make(connector, **settings), make_info(100)
    info.route = route
    body = b'{"input":"x"}'
    first = json.loads(prefill_body(transfer, PAIR, info, body))
    second = json.loads(decode_body(transfer, PAIR, PrefillResult(b'{"c":3}'), info, body))
    assert first.get("request_id") == second.get("request_id")
    assert ("request_id" in first) == (paired and route == "responses")
    if "request_id" in first:
        number = present(transfer.request_id(PAIR))
        assert first["request_id"] == f"resp_{number.decode()}"


@pytest.mark.parametrize("connector", NAMES)
@pytest.mark.parametrize("route", SPLIT)
@pytest.mark.parametrize(
    "more",
    [
        "",
        '"stream":true,"max_tokens":9,"stream_options":{"include_usage":true},',
        '"max_tokens":1,"max\\u005ftokens":99,"str\\u0065am":true,',
        '"thinking":{"type":"enabled","budget_tokens":2048},"store":true,',
        '"kv_transfer_params":null,"min_tokens":7,',
        '"kv_transfer_params":{"a":1},"kv\\u005ftransfer_params":null,',
    ],
)
def test_known_member_names_change_neither_leg(connector: str, route: str, more: str) -> None:
    body = ("{" + more + '"x":"max_tokens","messages":[{"content":"stream"}]}').encode()
    transfer, info = make(connector), make_info(100)
    info.route, info.has_min_tokens = route, "min_tokens" in more
    result = PrefillResult(b'{"c":3}')
    without_names = (
        prefill_body(transfer, PAIR, info, body),
        decode_body(transfer, PAIR, result, info, body),
    )
    info.field_names = frozenset(json.loads(body))
    with_names = (
        prefill_body(transfer, PAIR, info, body),
        decode_body(transfer, PAIR, result, info, body),
    )
    assert with_names == without_names


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9}, Usage(9, 1, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 1, 4)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 1, 4)),
        ({"input_tokens": 5, "cache_read_input_tokens": 4}, Usage(9, 1, 4)),
        (
            {"input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4},
            Usage(9, 1, 4),
        ),
        ({"tokens": {"input_tokens": 9.0}, "cached_tokens": 4.0}, Usage(9, 1, 4)),
        ({"tokens": {"input_tokens": 9.5}}, None),
        ({"prompt_tokens": "9"}, None),
        ({"prompt_tokens": True}, None),
        (None, None),
    ],
)
def test_usage_of_a_prefill_response(usage: object, expected: Usage | None) -> None:
    assert usage_of({"usage": usage}) == expected

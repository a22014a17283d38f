"""The bodies of both legs."""

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
from tests.proxy.core.making import ask
from tests.proxy.transfer.making import PAIR, make

BODY = b'{"prompt":"a \\u00e9 \\"max_tokens\\": 9","max_tokens":7, "temperature":0.70, "x":null}'
NAMES, MARKED = tuple(CONNECTORS), ("nixl", "mooncake")
SPLIT = sorted(route_names(lambda route: route.may_be_split))


def prefill(route: str, body: bytes, *, least: bool = False, connector: str = "nixl") -> Any:
    """Write a prefill leg and read it."""
    one = ask(100)
    one.route, one.least_output = route, least
    return json.loads(prefill_body(make(connector), PAIR, one, body))


@pytest.mark.parametrize("route", SPLIT)
def test_a_prefill_leg_writes_one_token_and_does_not_stream(route: str) -> None:
    body = b'{"stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"model":"m"}'
    leg = prefill(route, body)
    assert all(leg[name] == 1 for name in BY_NAME[route].output_limits)
    assert leg["stream"] is False
    assert "stream_options" not in leg
    assert leg["model"] == "m"
    assert leg["kv_transfer_params"]["do_remote_decode"] is True


def test_a_stored_response_is_not_stored_twice() -> None:
    assert prefill("responses", b'{"input":"x"}')["store"] is False
    assert "store" not in prefill("completions", b'{"prompt":"x"}')


@pytest.mark.parametrize(("least", "then"), [(True, 1), (False, None)])
def test_the_least_output_must_not_exceed_the_most(least: bool, then: int | None) -> None:
    body = b'{"prompt":"x","min_tokens":5}' if least else b'{"prompt":"x"}'
    assert prefill("completions", body, least=least).get("min_tokens") == then


@pytest.mark.parametrize("connector", NAMES)
@pytest.mark.parametrize(
    ("thinking", "stays"),
    [
        ('"thinking":{"type":"enabled","budget_tokens":2048},', False),
        ('"th\\u0069nking":{"budget_tokens":2048,"type":"enabled"},', False),
        ('"thinking":{"type":"disabled"},"thinking":{"type":"enabled","budget_tokens":1},', False),
        ('"thinking":{"type":"disabled"},', True),  # to a template that is another prompt
        ('"thinking":{"type":"adaptive"},', True),
        ('"thinking":{"type":"enabled"},"thinking":{"type":"disabled"},', True),
        ('"thinking":"enabled",', True),
        ('"thinking":null,', True),
    ],
)
def test_no_time_to_think_is_asked_for_beside_one_token(
    connector: str, thinking: str, stays: bool
) -> None:
    """Where a leg's parameters don't tell vLLM that it is one, it refuses that."""
    said = '"messages":[{"role":"user","content":"thinking"}],"max_tokens":4096}'
    body = ("{" + thinking + said).encode()
    leg = prefill("messages", body, connector=connector)
    theirs = json.loads(body)
    assert ("thinking" in leg) == (stays or connector in MARKED)
    assert leg.get("thinking", theirs["thinking"]) == theirs["thinking"]
    assert leg["messages"] == theirs["messages"]
    assert make(connector).is_marked == (connector in MARKED)


@pytest.mark.parametrize("connector", NAMES)
def test_a_leg_is_marked_by_what_vllm_reads(connector: str) -> None:
    leg = prefill("messages", b'{"messages":[],"max_tokens":9}', connector=connector)
    marked = (leg.get("kv_transfer_params") or {}).get("do_remote_decode", False)
    assert marked == make(connector).is_marked


def test_the_decode_leg_is_the_clients_body_and_the_parameters() -> None:
    nixl = make("nixl")
    leg = decode_body(nixl, PAIR, PrefillResult(b'{"do_remote_prefill":true}'), ask(100), BODY)
    assert leg == BODY[:-1] + b',"kv_transfer_params":{"do_remote_prefill":true}}'
    assert decode_body(nixl, PAIR, PrefillResult(), ask(100), BODY) is BODY


def test_what_a_client_may_have_said_is_replaced() -> None:
    """Where the operator lets it through, such a request is served whole; this is the backstop."""
    body = b'{"kv_transfer_params":{"a":1},"prompt":"x","kv_transfer_params":{"b":2}}'
    leg = decode_body(make("nixl"), PAIR, PrefillResult(b'{"c":3}'), ask(100), body)
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
def test_the_decode_leg_of_any_body_has_the_parameters_once(body: bytes) -> None:
    leg = decode_body(make("nixl"), PAIR, PrefillResult(b'{"c":3}'), ask(100), body)
    pairs = json.loads(leg, object_pairs_hook=list)
    assert [value for name, value in pairs if name == "kv_transfer_params"] == [[("c", 3)]]
    theirs = json.loads(body)
    theirs.pop("kv_transfer_params", None)
    ours = json.loads(leg)
    del ours["kv_transfer_params"]
    assert ours == theirs


@pytest.mark.parametrize("route", SPLIT)
@pytest.mark.parametrize(
    ("connector", "settings", "paired"),
    [
        ("nixl", {"mode": "push"}, True),
        ("nixl", {}, False),
        ("shared-storage", {"path": "/kv"}, False),
    ],
)
def test_both_legs_go_by_one_id_where_that_pairs_them(
    route: str, connector: str, settings: dict[str, Any], paired: bool
) -> None:
    """By X-Request-Id nearly everywhere; of responses a worker takes the body's, or makes one."""
    moves, one = make(connector, **settings), ask(100)
    one.route = route
    body = b'{"input":"x"}'
    first = json.loads(prefill_body(moves, PAIR, one, body))
    second = json.loads(decode_body(moves, PAIR, PrefillResult(b'{"c":3}'), one, body))
    assert first.get("request_id") == second.get("request_id")
    assert ("request_id" in first) == (paired and route == "responses")
    if "request_id" in first:
        number = present(moves.request_id(PAIR))
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
def test_to_know_a_bodys_names_changes_neither_leg(connector: str, route: str, more: str) -> None:
    body = ("{" + more + '"x":"max_tokens","messages":[{"content":"stream"}]}').encode()
    moves, one = make(connector), ask(100)
    one.route, one.least_output = route, "min_tokens" in more
    taken = PrefillResult(b'{"c":3}')
    plain = prefill_body(moves, PAIR, one, body), decode_body(moves, PAIR, taken, one, body)
    one.field_names = frozenset(json.loads(body))
    known = prefill_body(moves, PAIR, one, body), decode_body(moves, PAIR, taken, one, body)
    assert known == plain


@pytest.mark.parametrize(
    ("usage", "then"),
    [
        ({"prompt_tokens": 9}, Usage(9, 1, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 1, 4)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 1, 4)),
        ({"input_tokens": 5, "cache_read_input_tokens": 4}, Usage(9, 1, 4)),
        (
            {
                "input_tokens": 2,
                "cache_creation_input_tokens": 3,
                "cache_read_input_tokens": 4,
            },
            Usage(9, 1, 4),
        ),
        ({"tokens": {"input_tokens": 9.0}, "cached_tokens": 4.0}, Usage(9, 1, 4)),
        ({"tokens": {"input_tokens": 9.5}}, None),
        ({"prompt_tokens": "9"}, None),
        ({"prompt_tokens": True}, None),
        (None, None),
    ],
)
def test_what_a_prefill_worker_says_it_computed(usage: object, then: Usage | None) -> None:
    assert usage_of({"usage": usage}) == then

"""From body bytes to a RequestInfo."""

from __future__ import annotations

import gc
import json

import pytest

from proxy.core.model.route_table import PromptFields
from proxy.core.model.types import Reason, ReceivedRequest, RequestInfo
from proxy.core.request import json_edit, json_limits
from proxy.core.request.json_edit import MAX_MEMBERS, edit_members
from proxy.core.request.json_limits import LARGE_BODY_BYTES, MAX_NODES, masked
from proxy.core.request.parser import prompt_end, prompt_start
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import (
    GENERAL,
    LONG,
    MODEL,
    SHORT,
    chat,
    placed,
    read,
    refused,
    route,
    router_of,
    sized,
    spec,
    take_down,
    tenant,
    worker_of,
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"m"',
        b"{'model': 'm'}",
        b"[" * 5000,
        b"NaN",
        b'{"x": "\\ud83d", "seed": NaN}',
        b'{"messages": [], "vllm_xargs": {"\\ud83d": 1}}',
        '{"model": "m"}'.encode("utf-16"),
    ],
)
def test_invalid_json_object_is_400(body: bytes) -> None:
    refusal = refused(read(router_of(spec("w")), body))
    assert (refusal.status, refusal.reason) == (400, Reason.BAD_REQUEST)


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"messages": [], "max_tokens": 7}',  # a byte order mark
        b'{"messages": [], "max_tokens": 7, "logit_bias": {"5": -Infinity}}',
        b'{"temperature": NaN, "messages": [], "max_tokens": 7}',
        b'\xef\xbb\xbf{"max_tokens": 7, "messages": [], "user": "%b"}' % (b"u" * LARGE_BODY_BYTES),
    ],
)
def test_json_extensions_of_workers_are_accepted(body: bytes) -> None:
    assert sized(router_of(spec("w")), body).output_tokens == 7


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf{", b'{"seed": NaN, '])
@pytest.mark.parametrize("name", [b"kv_transfer_params", b"kv_transfer\\u005fparams"])
def test_steering_fields_in_extended_json_are_refused(start: bytes, name: bytes) -> None:
    body = start + b'"%b": {"remote_host": "h"}, "messages": []}' % name
    assert refused(read(router_of(spec("w")), body)).code == "forbidden_parameter"


def test_too_many_values_are_400() -> None:
    body = b'{"messages": [' + b"[]," * MAX_NODES + b"[]]}"
    refusal = refused(read(router_of(spec("w")), body))
    assert refusal.status == 400
    assert "more than 200,000 strings, lists and objects" in refusal.message


def test_a_million_token_ids_are_accepted() -> None:
    body = b'{"prompt": [' + b"7," * 999_999 + b"7]}"
    info = sized(router_of(spec("w", limit=2_000_000)), body, "/v1/completions")
    assert info.prompt_tokens == 1_000_000
    assert gc.isenabled()


@pytest.mark.parametrize("unit", [b'"a":1,', b'"\\u0061" : [] ,', b'"":"x",'])
def test_too_many_members_of_an_edited_body_are_400(unit: bytes) -> None:
    """All members have one name, so the parsed object has one member."""
    owner = Tenant(TenantSpec("a", salted=True))
    for count in (MAX_MEMBERS - 2, MAX_MEMBERS + 1, 20_000):
        body = b'{%b"stream": true, "messages": []}' % (unit * count)
        router = router_of(spec("w"))
        found = read(router, body, owner=owner)
        assert isinstance(found, RequestInfo) is (count < MAX_MEMBERS)
        if isinstance(found, RequestInfo):
            assert found.edits is not None
            assert edit_members(body, found.edits)
        else:
            assert refused(found).status == 400
            assert "more than 2,000 members" in refused(found).message
            assert router.placer.decisions == {("", Reason.BAD_REQUEST): 1}


def test_unknown_model_is_503_until_all_workers_have_listed_models() -> None:
    router = router_of(spec("w"))
    router.fleet.roster.add(spec("late"))
    refusal = refused(read(router, chat("x", model="adapter")))
    assert (refusal.status, refusal.reason) == (503, Reason.NOT_KNOWN_YET)
    assert refusal.retry_after_s == 1.0
    assert router.placer.decisions == {("", Reason.NOT_KNOWN_YET): 1}
    router.fleet.roster.set_served("late", ["m", "adapter"])
    router.fleet.health.probe_ok("late", 1.0)
    assert sized(router, chat("x", model="adapter")).model == "adapter"
    take_down(router.fleet, "late")
    assert refused(read(router, chat("x", model="other"))).status == 404


@pytest.mark.parametrize("model", [1, ["m"], {"m": 1}, True])
def test_model_that_is_no_string_is_400(model: object) -> None:
    assert refused(read(router_of(spec("w")), chat("x", model=model))).status == 400


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"model": "m", "messages": [1], "x": 1}, '"messages": [1]'),
        ({"model": "m", "tools": [{"name": "f"}], "messages": []}, '"tools"'),
        ({"a": 'see "messages" and "tools"', "b": "m" * 40, "messages": []}, '"messages": []'),
    ],
    ids=["messages", "tools before messages", "names of keys in a prompt"],
)
def test_prompt_starts_at_its_key(fields: dict[str, object], start: str) -> None:
    body = json.dumps(fields).encode()
    assert body[prompt_start(PromptFields.CHAT, body) :].startswith(start.encode())


def test_body_without_a_prompt_has_no_start() -> None:
    assert prompt_start(PromptFields.CHAT, b"{}") == -1
    assert prompt_start(PromptFields.INPUT, b'{"input": 1}') == -1


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"messages": ['"x":1'], "x": 1}, '"messages": ["\\"x\\":1'),
        ({"messages": [], "max_tokens": 1, "tools": ["max"]}, '"messages": ['),
        ({"x": 1, "messages": ["y"]}, '"messages": ["y'),
        ({"messages": ["]" * 99], "x": 1}, '"messages": ["' + "]" * 39),
        ({"messages": [], "é": 1}, '"messages": [], "\\u00e9": 1'),
    ],
)
def test_prompt_ends_at_the_next_field(fields: dict[str, object], prompt: str) -> None:
    body = json.dumps(fields).encode()
    start = prompt_start(PromptFields.CHAT, body)
    assert body[start : prompt_end(PromptFields.CHAT, fields, body, start)] == prompt.encode()


def sized_again(
    body: dict[str, object], tokens: int, again: dict[str, object], path: str = "chat/completions"
) -> tuple[RequestInfo, RequestInfo]:
    """Return the sizes of a body, before and after an engine has reported another's blocks."""
    router = router_of(spec("w"))
    reported, first = sized(router, body, f"/v1/{path}"), sized(router, again, f"/v1/{path}")
    assert reported.prefix
    for number, block in enumerate(reported.prefix, 1):
        router.fleet.roster.prefixes.add_block(block, 0, tokens * number)
    return first, sized(router, again, f"/v1/{path}")


def test_beginning_that_an_engine_has_reported_sizes_a_prompt() -> None:
    body = chat("a" * 1000)
    known, again = sized_again(body, 40, body)
    assert again.prompt_tokens == again.largest_prompt
    assert 0 < again.prompt_tokens - 40 * len(known.prefix) < 50
    assert 0 < again.prompt_error < known.prompt_error


@pytest.mark.parametrize("tokens", [0, 5000])
def test_reported_beginning_changes_a_size_within_bounds(tokens: int) -> None:
    body = chat("a" * 1000)
    first, again = sized_again(body, tokens, body)
    assert again.prompt_tokens == first.prompt_tokens + first.prompt_error * (2 if tokens else -1)
    assert again.min_prompt_size == first.min_prompt_size


def test_text_beside_a_reported_prompt_counts() -> None:
    body = {"model": MODEL, "input": "a" * 1000}
    large = body | {"instructions": "b" * 100_000}
    first, again = sized_again(body, 31, large, "responses")
    assert again.prompt_tokens > 0.98 * first.prompt_tokens
    documents = {**chat("a" * 1000), "documents": [{"text": "b" * 100_000}]}
    first, again = sized_again(documents, 31, documents)
    assert again.prompt_tokens >= first.min_prompt_size


def test_prompts_with_other_tools_after_them_have_other_prefixes() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 500}}]
    body = chat("a" * 1000)
    with_tools = {**body, "tools": tools}
    router = router_of(spec("w"))
    assert sized(router, with_tools).prefix == sized(router, with_tools).prefix
    assert not set(sized(router, with_tools).prefix) & set(sized(router, body).prefix)
    first, again = sized_again(with_tools, 300, body)
    assert again.prompt_tokens == first.prompt_tokens


@pytest.mark.parametrize(("cut", "hashed"), [(None, True), (-1, True), (20, False), ("20", False)])
def test_prompt_whose_beginning_may_be_cut_off_has_no_prefix(cut: object, hashed: bool) -> None:
    body = {**chat("a" * 1000), "truncate_prompt_tokens": cut}
    assert bool(sized(router_of(spec("w")), body).prefix) == hashed


# Counting


def test_tokens_are_counted_near_the_short_limit() -> None:
    router = router_of(spec("s", SHORT, 65_536), spec("l", LONG, 65_536), short_limit=1000)
    assert router.counter_for(sized(router, chat("x" * 3600, max_tokens=10))) is not None
    assert router.counter_for(sized(router, chat("x" * 400, max_tokens=10))) is None
    assert router.counter_for(sized(router, chat("x" * 40_000, max_tokens=10))) is None


def test_tokens_are_counted_near_a_shorter_context() -> None:
    router = router_of(spec("a", GENERAL, 2000), spec("b", GENERAL, 65_536))
    assert router.counter_for(sized(router, chat("x" * 7000, max_tokens=10))) is not None
    alone = router_of(spec("a", GENERAL, 2000))
    assert alone.counter_for(sized(alone, chat("x" * 7000, max_tokens=10))) is None


def test_tokens_are_counted_near_a_tenants_prompt_limit() -> None:
    router = router_of(spec("w", GENERAL, 65_536))
    owner = tenant("t", max_prompt_tokens=10_000)

    def of(size: int, path: str = "/v1/chat/completions") -> RequestInfo:
        return sized(router, chat("x" * size, max_tokens=1), path, owner)

    assert router.counter_for(of(60_000)) is None  # accepted: it may be short enough
    assert router.counter_for(of(170_000)) is None  # refused: it cannot be short enough
    assert refused(router.submit(of(170_000), 0.0)).reason is Reason.LIMITED
    for tokens, reason in ((10_001, Reason.LIMITED), (10_000, None)):
        router = router_of(spec("w", GENERAL, 65_536))  # a new router, because counts teach
        owner = tenant("t", max_prompt_tokens=10_000)
        doubtful = of(100_000)
        assert router.counter_for(doubtful) is worker_of(router, "w")
        router.apply_count(doubtful, tokens)
        assert getattr(router.submit(doubtful, 0.0), "reason", None) is reason
    assert router.counter_for(of(100_000, "/v1/messages")) is None
    assert refused(router.submit(of(100_000, "/v1/messages"), 0.0)).reason is Reason.LIMITED


def test_unknown_stored_response_goes_to_any_live_worker() -> None:
    router = router_of(spec("a", model="m0"), spec("b", model="m1"))
    router.fleet.roster.expect(["m2"])
    take_down(router.fleet, "a")
    get = router.read(ReceivedRequest(route("/v1/responses/resp_x", "GET"), b"", b"", "id"))
    assert isinstance(get, RequestInfo)
    assert placed(router.submit(get, 0.0)).worker.name == "b"


# Stored responses


@pytest.mark.plain("replaces a part")
@pytest.mark.parametrize("text", [r"\"", r"{\"key\": [1, 2]}, ", "a"])
@pytest.mark.parametrize("more", ["", ', "seed": NaN'])
def test_body_is_masked_once(text: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masking a text full of escapes takes as long as parsing it twice."""
    escaped = text * (4 * LARGE_BODY_BYTES // len(text))
    body = f'{{"priority": 1, "stream": true, "x": "{escaped}"{more}}}'.encode()
    masked_sizes: list[int] = []
    for module in (json_limits, json_edit):
        monkeypatch.setattr(
            module, "masked", lambda text: masked_sizes.append(len(text)) or masked(text)
        )
    found = sized(router_of(spec("w")), body, owner=tenant("t"))
    after = edit_members(body, present(found.edits), known_members=found.found_members)
    assert sum(size >= len(escaped) for size in masked_sizes) == 1
    assert json.loads(after) == {
        **{name: value for name, value in json.loads(body).items() if name != "priority"},
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("path", "fields", "asks"),
    [
        ("/v1/chat/completions", {"stream": True}, False),
        ("/v1/chat/completions", {"stream": True, "stream_options": None}, False),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": 1}}, True),
        ("/v1/completions", {"stream": True, "stream_options": {"include_usage": False}}, False),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, False),
        ("/v1/messages", {"stream": True}, True),
    ],
)
@pytest.mark.parametrize("owned", [False, True])
def test_usage_that_a_client_expects_in_its_stream(
    path: str, fields: dict[str, object], asks: bool, owned: bool
) -> None:
    """With tenants the router asks for usage too, and hides it."""
    body = {"model": MODEL, "messages": [], "prompt": "hi", "max_tokens": 1, **fields}
    found = sized(router_of(spec("w")), body, path, tenant("t") if owned else None)
    assert found.asks_usage is asks

"""Forbidden client fields are refused or removed, in every spelling; all others pass."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.core.model.types import RequestInfo
from proxy.core.request.client_fields import (
    ClientFields,
    find_forbidden,
    find_forbidden_in_form,
    find_repeated,
    has_address,
)
from proxy.core.request.json_edit import edit_members
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import chat, fleet_of, read, refused, route, spec
from tests.proxy.core.request.test_kv_transfer_fields import EVIL, TYPE, form

NONE_ALLOWED = ClientFields()
XARGS = b'Content-Disposition: form-data; name="vllm_xargs"'


def forbidden_field(
    body: str, allowed: ClientFields = NONE_ALLOWED, *, tenants: bool = True
) -> str:
    return find_forbidden(orjson.loads(body), body.encode(), tenants=tenants, may=allowed)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"vllm_xargs": {"lane": "urgent"}}', "vllm_xargs"),
        ('{"vllm\\u005fxargs": {"lane": "urgent"}}', "vllm_xargs"),
        ('{"vllm_xargs": {"lane": "urgent"}, "vllm_xargs": null}', "vllm_xargs"),
        ('{"vllm_xargs": 1}', "vllm_xargs"),
        ('{"sampling_params": {"extra_args": {"lane": "x"}}}', "sampling_params.extra_args"),
        ('{"sampling_params": {"extra\\u005fargs": {"lane": "x"}}}', "sampling_params.extra_args"),
        (f'{{"kv_transfer_params": {EVIL}}}', "kv_transfer_params"),
        ('{"ec_transfer\\u005fparams": {}}', "ec_transfer_params"),
    ],
)
def test_forbidden_fields_with_tenants(body: str, name: str) -> None:
    assert forbidden_field(body) == name
    assert bool(forbidden_field(body, tenants=False)) == ("_transfer_params" in name)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"previous_response_id": "a", "previous_response_id": "b"}', "previous_response_id"),
        ('{"previous_response_id": "a", "previous_response_id": null}', "previous_response_id"),
        ('{"previous_response_id": "a", "previous_response_id": "a"}', "previous_response_id"),
        (
            '{"previous_response_id":"a","x":{},"previous\\u005fresponse_id":"b"}',
            "previous_response_id",
        ),
        ('{"cache_salt": "theirs", "cache_salt": null}', "cache_salt"),
        ('{"previous_response_id": "a", "cache_salt": "s"}', ""),
        ('{"previous_response_id": "a", "metadata": {"previous_response_id": "b"}}', ""),
        ('{"previous_response_id": "a", "input": "\\"previous_response_id\\": \\"b\\""}', ""),
        ('{"input": [{"cache_salt": 1, "previous_response_id": 2}]}', ""),
        ('{"model": "a", "model": "b"}', ""),
    ],
)
@pytest.mark.parametrize("long", [0, 20_000])
def test_repeated_stored_state_fields_are_found(body: str, name: str, long: int) -> None:
    body = f'{{"x": "{"y" * long}", {body[1:]}'
    assert find_repeated(orjson.loads(body), body.encode()) == name


@pytest.mark.parametrize("tenants", [True, False])
def test_repeated_previous_response_id_is_refused(tenants: bool) -> None:
    """A worker may read either member, and the other may be another tenant's."""
    router = Router(RouterSettings(), fleet_of(spec("w0")))
    tenant = Tenant(TenantSpec("a")) if tenants else None
    router.remember("resp_a", "w0", tenant)
    body = (
        b'{"model": "tiny", "input": "hi", "previous_response_id": "resp_b", '
        b'"previous_response_id": "resp_a"}'
    )
    refusal = refused(router.read(route("/v1/responses"), body, b"", "id", tenant))
    assert (refusal.status, refusal.param) == (400, "previous_response_id")
    assert "more than once" in refusal.message


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"vllm_xargs": null}',
        '{"sampling_params": {"max_tokens": 1}}',
        '{"prompt": "vllm_xargs", "user": "\\"vllm_xargs\\": {}"}',
        '{"messages": [{"role": "user", "content": "x", "vllm_xargs": {}}]}',
        '{"tools": [{"function": {"parameters": {"properties": {"vllm_xargs": {}}}}}]}',
        '{"priority": 1, "cache_salt": "s", "session_id": "s", "top_k": 3, "logit_bias": {}}',
    ],
)
def test_allowed_fields_pass(body: str) -> None:
    assert forbidden_field(body) == ""


STEERING = "___prefill_addr_10.6.6.6:1___decode_addr_10.6.6.7:2_x"


@pytest.mark.parametrize(
    "body",
    [
        f'{{"request_id": "{STEERING}"}}',
        f'{{"request_id": "{STEERING}", "request_id": "x"}}',
        f'{{"request\\u005fid": "{STEERING}"}}',
        '{"request_id": "\\u005f__prefill_addr_10.6.6.6:1___decode"}',
    ],
)
def test_request_id_with_worker_addresses_is_forbidden(body: str) -> None:
    for tenants in (True, False):
        assert forbidden_field(body, tenants=tenants) == "request_id"
        assert forbidden_field(body, ClientFields(kv_transfer=True), tenants=tenants) == ""
    assert forbidden_field('{"request_id": "mine", "prompt": "___prefill_addr_"}') == ""


@pytest.mark.parametrize("request_id", [b"", b"abc", b"prefill_addr", b"cmpl-___x_decode"])
def test_other_ids_have_no_address(request_id: bytes) -> None:
    assert not has_address(request_id)


@pytest.mark.parametrize("request_id", [b"x___prefill_addr_a:1", b"___decode_addr_b:2_"])
def test_half_an_address_is_enough(request_id: bytes) -> None:
    assert has_address(request_id)


def test_forbidden_form_fields() -> None:
    lane = form((XARGS, b'{"lane": "urgent"}'))
    assert find_forbidden_in_form(lane, TYPE, tenants=True, may=NONE_ALLOWED) == "vllm_xargs"
    assert find_forbidden_in_form(lane, TYPE, tenants=False, may=NONE_ALLOWED) == ""
    assert find_forbidden_in_form(lane, TYPE, tenants=True, may=ClientFields(arguments=True)) == ""
    name = b'Content-Disposition: form-data; name="prompt"'
    plain = form((name, b"what is vllm_xargs?"))
    assert find_forbidden_in_form(plain, TYPE, tenants=True, may=NONE_ALLOWED) == ""


# Fields as the router reads them


def read_as_tenant(
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    *,
    tenant_spec: TenantSpec | None = None,
    **settings: Any,
) -> RequestInfo:
    router = Router(RouterSettings(**settings), fleet_of(spec("w")))
    raw = orjson.dumps(body)
    owner = Tenant(tenant_spec or TenantSpec("a"))
    info = router.read(route(path), raw, b"application/json", "id", owner)
    assert isinstance(info, RequestInfo), info
    return info


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_priority_is_removed(path: str) -> None:
    assert read_as_tenant(chat("hi", priority=-5), path).fields == {"priority": None}
    assert read_as_tenant(chat("hi"), path).fields is None


def test_batch_requests_have_batch_rank_for_any_tenant() -> None:
    router = Router(RouterSettings(pass_priority=True), fleet_of(spec("w")))
    body = orjson.dumps(chat("hi"))
    interactive = Tenant(TenantSpec("a", Rank.INTERACTIVE))
    for tenant in (interactive, None):
        info = router.read(route(), body, b"application/json", "id", tenant, batch=True)
        assert isinstance(info, RequestInfo)
        assert info.rank is Rank.BATCH
        assert info.fields == (None if tenant is None else {"priority": b"1"})


def test_vllm_xargs_are_refused_as_an_openai_error() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    body = orjson.dumps(chat("hi", vllm_xargs={"lane": "urgent"}))
    answer = router.read(route(), body, b"application/json", "id", Tenant(TenantSpec("a")))
    refusal = refused(answer)
    assert (refusal.status, refusal.param, refusal.code) == (
        400, "vllm_xargs", "forbidden_parameter",
    )  # fmt: skip
    assert isinstance(read(router, body), RequestInfo), "allowed without tenants"


# Streams


USAGE_REQUESTED = {"stream_options": b'{"include_usage":true}'}


@pytest.mark.parametrize("stream", [True, 1, "true", "True", "yes", "on", "T", "1", 1.0])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]
)
def test_usage_is_requested_for_streams(path: str, stream: object) -> None:
    body = chat("hi", prompt="hi", stream=stream)
    for options in (None, {}, {"include_usage": False}, {"include_usage": "no"},
                    {"include_usage": None, "continuous_usage_stats": True}):  # fmt: skip
        info = read_as_tenant(body | {"stream_options": options}, path)
        assert info.fields == USAGE_REQUESTED
        assert info.stream
    assert read_as_tenant(body, path).fields == USAGE_REQUESTED


@pytest.mark.parametrize("value", [True, "true", 1, "ON"])
def test_include_usage_of_the_client_is_kept(value: object) -> None:
    options = {"include_usage": value, "continuous_usage_stats": True}
    assert read_as_tenant(chat("hi", stream=True, stream_options=options)).fields is None


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/responses", "/cohere/v2/chat", "/v1/embeddings", "/tokenize"]
)
def test_usage_is_not_requested_on_other_routes(path: str) -> None:
    assert read_as_tenant(chat("hi", stream=True, input="x"), path).fields is None


@pytest.mark.parametrize("stream", [False, None, "false", "off", 0, "", [], {"x": 1}])
def test_usage_is_not_requested_without_a_stream(stream: object) -> None:
    info = read_as_tenant(chat("hi", stream=stream, stream_options={"include_usage": False}))
    assert info.fields is None
    assert not info.stream


LONG = "a prompt of some length, such as are cached " * 40


def test_prefixes_of_salted_prompts_differ() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))

    def prefix(tenant: Tenant | None, **fields: Any) -> tuple[int, ...]:
        body = orjson.dumps(chat(LONG, **fields))
        info = router.read(route(), body, b"application/json", "id", tenant)
        assert isinstance(info, RequestInfo)
        assert info.prefix
        return info.prefix

    a, b = (Tenant(TenantSpec(name, salted=True)) for name in "ab")
    plain, other = (Tenant(TenantSpec(name)) for name in "cd")
    assert prefix(a) == prefix(a)
    assert len({prefix(a), prefix(b), prefix(plain)}) == 3
    assert prefix(plain) == prefix(other) == prefix(None)
    assert prefix(None, cache_salt="x") == prefix(plain, cache_salt="x")
    assert len({prefix(None, cache_salt=salt) for salt in ("", "x", "y")}) == 3
    assert len({prefix(a, cache_salt=salt) for salt in ("", "x", "y")}) == 3


def test_client_cannot_use_the_salt_of_another_tenant() -> None:
    """A salt can be computed from a tenant's name, so client salts are changed."""
    router = Router(RouterSettings(), fleet_of(spec("w")))

    def salts(name: str, own: object = None) -> tuple[str, dict[str, Any] | None]:
        body = orjson.dumps(chat(LONG) | ({} if own is None else {"cache_salt": own}))
        tenant = router.tenants.get(name)
        info = router.read(route(), body, b"application/json", "id", tenant)
        assert isinstance(info, RequestInfo)
        return info.salt, info.fields and json.loads(edit_members(body, info.fields))

    def tenants(*, salted: bool) -> None:
        specs = [TenantSpec("legal", salted=salted), TenantSpec("intern"), TenantSpec("c")]
        router.tenants.replace(specs, {})

    for _ in range(2):  # an operator may switch salting on and off
        tenants(salted=True)
        legal, _ = salts("legal")
        guessed, body = salts("intern", legal)
        assert guessed != legal
        assert present(body)["cache_salt"] == guessed
        assert len({salts("intern", "x")[0], salts("c", "x")[0], salts("intern", "y")[0], "x"}) == 4
        assert salts("intern", "x") == salts("intern", "x")
        for none in (None, "", 7):
            assert salts("intern", none) == ("", None)
        tenants(salted=False)
        assert salts("intern", legal) == (legal, None), "no salted tenant"


@pytest.mark.parametrize("path", ["/cohere/v2/chat", "/v2/embed"])
def test_salted_tenant_is_refused_on_unsalted_routes(path: str) -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    body = orjson.dumps(chat("hi", texts=["x"]))
    tenant = Tenant(TenantSpec("a", salted=True))
    refusal = refused(router.read(route(path), body, b"application/json", "id", tenant))
    assert (refusal.status, refusal.code) == (400, "not_isolated")
    unsalted = router.read(route(path), body, b"application/json", "id", Tenant(TenantSpec("b")))
    assert isinstance(unsalted, RequestInfo)


# Models and stored responses


def test_model_not_allowed_for_the_tenant_is_403() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w", model="m"), spec("v", model="n")))
    tenant = Tenant(TenantSpec("a", models=frozenset(["n"])))

    def answer(**fields: Any) -> Any:
        body = orjson.dumps(chat("hi", **fields))
        return router.read(route(), body, b"application/json", "id", tenant)

    refusal = refused(answer(model="m"))
    assert (refusal.status, refusal.code, refusal.param) == (403, "model_not_allowed", "model")
    assert answer(model="n").model == "n"
    assert answer().model == "n", "the only model that the tenant may use"
    unknown = refused(answer(model="x"))
    assert unknown.status == 404
    assert "serves: n." in unknown.message, "other models are not listed"


@pytest.mark.parametrize(
    "model",
    ['"n"', '""', "null", '"m", "model": null', '"m", "model": "n"', '"m", "mod\\u0065l": "n"'],
)
def test_worker_receives_the_model_checked_for_the_tenant(model: str) -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    router.fleet.roster.set_served("w", {"m": 4096, "n": 4096, "o": 4096}, 4096)
    body = f'{{"model": {model}, "messages": []}}'.encode()

    def read_for(tenant: Tenant, body: bytes) -> RequestInfo:
        ask = router.read(route(), body, b"application/json", "id", tenant)
        assert isinstance(ask, RequestInfo)
        assert ask.model == "n"
        return ask

    for sent in (body, b'{"messages": []}'):
        fields = present(read_for(Tenant(TenantSpec("a", models=frozenset(["n"]))), sent).fields)
        pairs = json.loads(edit_members(sent, fields), object_pairs_hook=list)
        assert {model for name, model in pairs if name == "model"} == {"n"}
    if model.endswith('"n"'):
        assert read_for(Tenant(TenantSpec("b")), body).fields is None


def test_form_of_a_tenant_must_name_its_model_unambiguously() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    router.fleet.roster.set_served("w", {"m": 4096, "n": 4096}, 4096)
    restricted, unrestricted = (
        Tenant(TenantSpec("a", models=frozenset(["n"]))),
        Tenant(TenantSpec("b")),
    )
    plain, other = (
        (b'Content-Disposition: form-data; name="model"', name) for name in (b"n", b"m")
    )
    unquoted = (b"Content-Disposition: form-data; name=model", b"m")

    def answer(tenant: Tenant, *parts: tuple[bytes, bytes]) -> Any:
        path = route("/v1/audio/transcriptions")
        return router.read(path, form(*parts), TYPE, "id", tenant)

    assert answer(restricted, plain).model == "n"
    assert refused(answer(restricted, other)).status == 403
    for parts in ((), (plain, other), (plain, unquoted)):
        refusal = refused(answer(restricted, *parts))
        assert (refusal.status, refusal.param) == (400, "model")
    assert answer(unrestricted, plain, unquoted).model == "n"


def test_stored_response_is_visible_to_its_tenant_only() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w"), spec("v")))
    a, b = (Tenant(TenantSpec(name)) for name in "ab")
    router.remember("resp_1", "v", a)

    def fetch(tenant: Tenant | None, response: str = "resp_1") -> Any:
        path = route(f"/v1/responses/{response}", "GET")
        return router.read(path, b"", b"", "id", tenant)

    def continue_response(tenant: Tenant | None) -> Any:
        body = orjson.dumps({"input": "go on", "previous_response_id": "resp_1"})
        return router.read(route("/v1/responses"), body, b"application/json", "id", tenant)

    for answer in (fetch(a), continue_response(a)):
        assert answer.pinned == "v"
        assert answer.tenant is a
    for answer in (fetch(b), continue_response(b), fetch(a, "resp_2")):
        refusal = refused(answer)
        assert (refusal.status, refusal.code) == (404, "response_not_found")
    assert fetch(None).pinned == ""

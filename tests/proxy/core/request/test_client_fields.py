"""Forbidden client fields are refused or removed, in every spelling; all others pass."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.core.model.types import ReceivedRequest
from proxy.core.request.client_fields import (
    ClientFields,
    find_forbidden,
    find_forbidden_in_form,
    find_repeated,
    has_address,
)
from proxy.core.request.json_edit import edit_members
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import chat, read, refused, route, router_of, sized, spec, tenant
from tests.proxy.core.request.test_kv_transfer_fields import EVIL, PROMPT, TYPE, XARGS, form

NONE_ALLOWED = ClientFields()


def forbidden_field(
    body: str, allowed: ClientFields = NONE_ALLOWED, *, tenants: bool = True
) -> str:
    return find_forbidden(orjson.loads(body), body.encode(), tenants=tenants, allowed=allowed)


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
        ("{}", ""),
        ('{"vllm_xargs": null}', ""),
        ('{"sampling_params": {"max_tokens": 1}}', ""),
        ('{"prompt": "vllm_xargs", "user": "\\"vllm_xargs\\": {}"}', ""),
        ('{"messages": [{"role": "user", "content": "x", "vllm_xargs": {}}]}', ""),
        ('{"tools": [{"function": {"parameters": {"properties": {"vllm_xargs": {}}}}}]}', ""),
        ('{"priority": 1, "cache_salt": "s", "session_id": "s", "top_k": 3, "logit_bias": {}}', ""),
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
        ('{"previous_response_id":1,"previous\\u005fresponse_id":2}', "previous_response_id"),
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


@pytest.mark.parametrize("owner", [tenant("a"), None])
def test_repeated_previous_response_id_is_refused(owner: Tenant | None) -> None:
    """A worker may read either member, and the other may be another tenant's."""
    router = router_of(spec("w0"))
    router.remember("resp_a", "w0", owner)
    body = b'{"input": "hi", "previous_response_id": "b", "previous_response_id": "resp_a"}'
    refusal = refused(read(router, body, "/v1/responses", owner))
    assert (refusal.status, refusal.param) == (400, "previous_response_id")
    assert "more than once" in refusal.message


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


def test_half_an_address_in_an_id_is_enough() -> None:
    assert all(map(has_address, (b"x___prefill_addr_a:1", b"___decode_addr_b:2_")))
    assert not any(map(has_address, (b"", b"abc", b"prefill_addr", b"cmpl-___x_decode")))


def test_forbidden_form_fields() -> None:
    lane = form((XARGS, b'{"lane": "urgent"}'))
    assert find_forbidden_in_form(lane, TYPE, tenants=True, allowed=NONE_ALLOWED) == "vllm_xargs"
    assert find_forbidden_in_form(lane, TYPE, tenants=False, allowed=NONE_ALLOWED) == ""
    assert (
        find_forbidden_in_form(lane, TYPE, tenants=True, allowed=ClientFields(arguments=True)) == ""
    )
    plain = form((PROMPT, b"what is vllm_xargs?"))
    assert find_forbidden_in_form(plain, TYPE, tenants=True, allowed=NONE_ALLOWED) == ""


# Fields as the router reads them


CHAT = "/v1/chat/completions"


def fields_of(body: dict[str, Any], path: str = CHAT) -> object:
    """Return the fields that the router sets in a tenant's body."""
    return sized(router_of(spec("w")), body, path, tenant("a")).edits


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_priority_is_removed(path: str) -> None:
    assert fields_of(chat("hi", priority=-5), path) == {"priority": None}
    assert fields_of(chat("hi"), path) is None


@pytest.mark.parametrize("owner", [tenant("a", Rank.INTERACTIVE), None])
def test_batch_requests_have_batch_rank_for_any_tenant(owner: Tenant | None) -> None:
    router = router_of(spec("w"), pass_priority=True)
    info = sized(router, chat("hi"), owner=owner, batch=True)
    assert info.rank is Rank.BATCH
    assert info.edits == (None if owner is None else {"priority": b"1"})


def test_vllm_xargs_are_refused_as_an_openai_error() -> None:
    router, body = router_of(spec("w")), chat("hi", vllm_xargs={"lane": "urgent"})
    refusal = refused(read(router, body, owner=tenant("a")))
    assert (refusal.status, refusal.code) == (400, "forbidden_parameter")
    assert refusal.param == "vllm_xargs"
    sized(router, body)  # allowed without tenants


# Streams


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]
)
def test_usage_is_requested_for_streams(path: str) -> None:
    requested = {"stream_options": b'{"include_usage":true}'}
    body = chat("hi", prompt="hi")
    for stream in (True, 1, "true", "True", "yes", "on", "T", "1", 1.0):
        assert fields_of(body | {"stream": stream}, path) == requested
    for include in (False, "no", None):
        options = {"include_usage": include, "continuous_usage_stats": True}
        assert fields_of(body | {"stream": True, "stream_options": options}, path) == requested
    for include in (True, "true", 1, "ON"):  # the client's own
        options = {"include_usage": include, "continuous_usage_stats": True}
        assert fields_of(body | {"stream": True, "stream_options": options}, path) is None


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        *((CHAT, no) for no in (False, None, "false", "off", 0, "", [], {"x": 1})),
        *((f"/v1/{name}", True) for name in ("messages", "responses", "embeddings")),
        ("/cohere/v2/chat", True),
        ("/tokenize", True),
    ],
)
def test_usage_is_not_requested_without_a_stream_or_on_other_routes(
    path: str, stream: object
) -> None:
    body = chat("hi", stream=stream, input="x", stream_options={"include_usage": False})
    info = sized(router_of(spec("w")), body, path, tenant("a"))
    assert info.edits is None
    assert not info.stream or stream is True


LONG = "a prompt of some length, such as are cached " * 40


def test_prefixes_of_salted_prompts_differ() -> None:
    router = router_of(spec("w"))

    def prefix(owner: Tenant | None, **fields: Any) -> tuple[int, ...]:
        info = sized(router, chat(LONG, **fields), owner=owner)
        assert info.prefix
        return info.prefix

    a, b = (Tenant(TenantSpec(name, salted=True)) for name in "ab")
    plain, other = tenant("c"), tenant("d")
    assert prefix(a) == prefix(a)
    assert len({prefix(a), prefix(b), prefix(plain)}) == 3
    assert prefix(plain) == prefix(other) == prefix(None)
    assert prefix(None, cache_salt="x") == prefix(plain, cache_salt="x")
    assert len({prefix(None, cache_salt=salt) for salt in ("", "x", "y")}) == 3
    assert len({prefix(a, cache_salt=salt) for salt in ("", "x", "y")}) == 3


def test_client_cannot_use_the_salt_of_another_tenant() -> None:
    """A salt can be computed from a tenant's name, so client salts are changed."""
    router = router_of(spec("w"))

    def salts(name: str, own: object = None) -> tuple[str, dict[str, Any] | None]:
        body = orjson.dumps(chat(LONG) | ({} if own is None else {"cache_salt": own}))
        info = sized(router, body, owner=router.tenants.get(name))
        return info.salt, info.edits and json.loads(edit_members(body, info.edits))

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
    router, body = router_of(spec("w")), chat("hi", texts=["x"])
    refusal = refused(read(router, body, path, Tenant(TenantSpec("a", salted=True))))
    assert (refusal.status, refusal.code) == (400, "not_isolated")
    sized(router, body, path, tenant("b"))


# Models and stored responses


RESTRICTED = Tenant(TenantSpec("a", models=frozenset(["n"])))


def test_model_not_allowed_for_the_tenant_is_403() -> None:
    router = router_of(spec("w", model="m"), spec("v", model="n"))

    def answer(**fields: Any) -> Any:
        return read(router, chat("hi", **fields), owner=RESTRICTED)

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
    router = router_of(spec("w"))
    router.fleet.roster.set_served("w", {"m": 4096, "n": 4096, "o": 4096}, 4096)
    body = f'{{"model": {model}, "messages": []}}'.encode()
    for sent in (body, b'{"messages": []}'):
        info = sized(router, sent, owner=RESTRICTED)
        pairs = json.loads(edit_members(sent, present(info.edits)), object_pairs_hook=list)
        assert (info.model, {model for name, model in pairs if name == "model"}) == ("n", {"n"})
    if model.endswith('"n"'):
        assert sized(router, body, owner=tenant("b")).edits is None


def test_form_of_a_tenant_must_name_its_model_unambiguously() -> None:
    router = router_of(spec("w"))
    router.fleet.roster.set_served("w", {"m": 4096, "n": 4096}, 4096)
    plain, other = (
        (b'Content-Disposition: form-data; name="model"', name) for name in (b"n", b"m")
    )
    unquoted = (b"Content-Disposition: form-data; name=model", b"m")

    def answer(owner: Tenant, *parts: tuple[bytes, bytes]) -> Any:
        path = route("/v1/audio/transcriptions")
        return router.read(ReceivedRequest(path, form(*parts), TYPE, "id", owner))

    assert answer(RESTRICTED, plain).model == "n"
    assert refused(answer(RESTRICTED, other)).status == 403
    for parts in ((), (plain, other), (plain, unquoted)):
        refusal = refused(answer(RESTRICTED, *parts))
        assert (refusal.status, refusal.param) == (400, "model")
    assert answer(tenant("b"), plain, unquoted).model == "n"


def test_stored_response_is_visible_to_its_tenant_only() -> None:
    router, a, b = router_of(spec("w"), spec("v")), tenant("a"), tenant("b")
    router.remember("resp_1", "v", a)

    def fetch(owner: Tenant | None, response: str = "resp_1") -> Any:
        path = route(f"/v1/responses/{response}", "GET")
        return router.read(ReceivedRequest(path, b"", b"", "id", owner))

    def continue_response(owner: Tenant) -> Any:
        body = {"input": "go on", "previous_response_id": "resp_1"}
        return read(router, body, "/v1/responses", owner)

    for answer in (fetch(a), continue_response(a)):
        assert answer.pinned == "v"
        assert answer.tenant is a
    for answer in (fetch(b), continue_response(b), fetch(a, "resp_2")):
        refusal = refused(answer)
        assert (refusal.status, refusal.code) == (404, "response_not_found")
    assert fetch(None).pinned == ""

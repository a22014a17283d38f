"""What a client may not say is refused or taken out, in every spelling; all else passes."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.core.model.types import RequestInfo
from proxy.core.request.client_fields import (
    ClientFields,
    forbidden,
    forbidden_form,
    has_address,
    repeated,
)
from proxy.core.request.json_edit import spliced
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import chat, fleet_of, read, refused, route, spec
from tests.proxy.core.request.test_kv_transfer_fields import EVIL, TYPE, form

NOTHING = ClientFields()
XARGS = b'Content-Disposition: form-data; name="vllm_xargs"'


def found(body: str, may: ClientFields = NOTHING, *, tenants: bool = True) -> str:
    return forbidden(orjson.loads(body), body.encode(), tenants=tenants, may=may)


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
def test_found_with_tenants(body: str, name: str) -> None:
    assert found(body) == name
    assert bool(found(body, tenants=False)) == ("_transfer_params" in name)


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
def test_what_names_stored_state_is_there_once(body: str, name: str, long: int) -> None:
    body = f'{{"x": "{"y" * long}", {body[1:]}'
    assert repeated(orjson.loads(body), body.encode()) == name


@pytest.mark.parametrize("tenants", [True, False])
def test_a_response_that_is_referred_to_twice_is_refused(tenants: bool) -> None:
    """Which of two members a worker reads is not known: the other may be another tenant's."""
    router = Router(RouterSettings(), fleet_of(spec("w0")))
    one = Tenant(TenantSpec("a")) if tenants else None
    router.remember("resp_a", "w0", one)
    body = (
        b'{"model": "tiny", "input": "hi", "previous_response_id": "resp_b", '
        b'"previous_response_id": "resp_a"}'
    )
    refusal = refused(router.read(route("/v1/responses"), body, b"", "id", one))
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
def test_what_passes(body: str) -> None:
    assert found(body) == ""


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
def test_an_id_in_the_body_that_names_addresses(body: str) -> None:
    for tenants in (True, False):
        assert found(body, tenants=tenants) == "request_id"
        assert found(body, ClientFields(kv_transfer=True), tenants=tenants) == ""
    assert found('{"request_id": "mine", "prompt": "___prefill_addr_"}') == ""


@pytest.mark.parametrize("request_id", [b"", b"abc", b"prefill_addr", b"cmpl-___x_decode"])
def test_other_ids_have_no_address(request_id: bytes) -> None:
    assert not has_address(request_id)


@pytest.mark.parametrize("request_id", [b"x___prefill_addr_a:1", b"___decode_addr_b:2_"])
def test_half_an_address_is_enough(request_id: bytes) -> None:
    assert has_address(request_id)


def test_forms() -> None:
    lane = form((XARGS, b'{"lane": "urgent"}'))
    assert forbidden_form(lane, TYPE, tenants=True, may=NOTHING) == "vllm_xargs"
    assert forbidden_form(lane, TYPE, tenants=False, may=NOTHING) == ""
    assert forbidden_form(lane, TYPE, tenants=True, may=ClientFields(arguments=True)) == ""
    name = b'Content-Disposition: form-data; name="prompt"'
    plain = form((name, b"what is vllm_xargs?"))
    assert forbidden_form(plain, TYPE, tenants=True, may=NOTHING) == ""


# As a router reads them


def asked(
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    *,
    who: TenantSpec | None = None,
    **settings: Any,
) -> RequestInfo:
    router = Router(RouterSettings(**settings), fleet_of(spec("w")))
    raw = orjson.dumps(body)
    tenant = Tenant(who or TenantSpec("a"))
    one = router.read(route(path), raw, b"application/json", "id", tenant)
    assert isinstance(one, RequestInfo), one
    return one


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_a_priority_is_taken_out(path: str) -> None:
    assert asked(chat("hi", priority=-5), path).fields == {"priority": None}
    assert asked(chat("hi"), path).fields is None


def test_a_batch_is_batch_whoevers_it_is() -> None:
    router = Router(RouterSettings(pass_priority=True), fleet_of(spec("w")))
    body = orjson.dumps(chat("hi"))
    who = Tenant(TenantSpec("a", Rank.INTERACTIVE))
    for tenant in (who, None):
        one = router.read(route(), body, b"application/json", "id", tenant, batch=True)
        assert isinstance(one, RequestInfo)
        assert one.rank is Rank.BATCH
        assert one.fields == (None if tenant is None else {"priority": b"1"})


def test_arguments_are_refused_in_openais_words() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    body = orjson.dumps(chat("hi", vllm_xargs={"lane": "urgent"}))
    answer = router.read(route(), body, b"application/json", "id", Tenant(TenantSpec("a")))
    refusal = refused(answer)
    assert (refusal.status, refusal.param, refusal.code) == (
        400, "vllm_xargs", "forbidden_parameter",
    )  # fmt: skip
    assert isinstance(read(router, body), RequestInfo), "without tenants it passes"


# Streams


ASKED = {"stream_options": b'{"include_usage":true}'}


@pytest.mark.parametrize("stream", [True, 1, "true", "True", "yes", "on", "T", "1", 1.0])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]
)
def test_a_stream_tells_its_usage_to_the_router(path: str, stream: object) -> None:
    body = chat("hi", prompt="hi", stream=stream)
    for options in (None, {}, {"include_usage": False}, {"include_usage": "no"},
                    {"include_usage": None, "continuous_usage_stats": True}):  # fmt: skip
        one = asked(body | {"stream_options": options}, path)
        assert one.fields == ASKED
        assert one.stream
    assert asked(body, path).fields == ASKED


@pytest.mark.parametrize("said", [True, "true", 1, "ON"])
def test_what_the_client_asked_for_itself_is_left_to_it(said: object) -> None:
    options = {"include_usage": said, "continuous_usage_stats": True}
    assert asked(chat("hi", stream=True, stream_options=options)).fields is None


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/responses", "/cohere/v2/chat", "/v1/embeddings", "/tokenize"]
)
def test_others_tell_usage_unasked_or_never(path: str) -> None:
    assert asked(chat("hi", stream=True, input="x"), path).fields is None


@pytest.mark.parametrize("stream", [False, None, "false", "off", 0, "", [], {"x": 1}])
def test_what_is_no_stream_is_not_asked(stream: object) -> None:
    one = asked(chat("hi", stream=stream, stream_options={"include_usage": False}))
    assert one.fields is None
    assert not one.stream


LONG = "a prompt of some length, such as are cached " * 40


def test_salted_prompts_are_apart_in_what_is_believed_to_be_cached() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))

    def prefix(tenant: Tenant | None, **fields: Any) -> tuple[int, ...]:
        body = orjson.dumps(chat(LONG, **fields))
        one = router.read(route(), body, b"application/json", "id", tenant)
        assert isinstance(one, RequestInfo)
        assert one.prefix
        return one.prefix

    a, b = (Tenant(TenantSpec(name, salted=True)) for name in "ab")
    plain, other = (Tenant(TenantSpec(name)) for name in "cd")
    assert prefix(a) == prefix(a)
    assert len({prefix(a), prefix(b), prefix(plain)}) == 3
    assert prefix(plain) == prefix(other) == prefix(None)
    assert prefix(None, cache_salt="x") == prefix(plain, cache_salt="x")
    assert len({prefix(None, cache_salt=salt) for salt in ("", "x", "y")}) == 3
    assert len({prefix(a, cache_salt=salt) for salt in ("", "x", "y")}) == 3


def test_nobody_can_name_the_salt_of_another() -> None:
    """Whoever knows a tenant's name can work it out: so nobody's own is taken as it is."""
    router = Router(RouterSettings(), fleet_of(spec("w")))

    def salts(name: str, own: object = None) -> tuple[str, dict[str, Any] | None]:
        body = orjson.dumps(chat(LONG) | ({} if own is None else {"cache_salt": own}))
        who = router.tenants.get(name)
        one = router.read(route(), body, b"application/json", "id", who)
        assert isinstance(one, RequestInfo)
        return one.salt, one.fields and json.loads(spliced(body, one.fields))

    def tenants(*, salted: bool) -> None:
        specs = [TenantSpec("legal", salted=salted), TenantSpec("intern"), TenantSpec("c")]
        router.tenants.replace(specs, {})

    for _ in range(2):  # an operator may go back and forth
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
        assert salts("intern", legal) == (legal, None), "nobody's"


@pytest.mark.parametrize("path", ["/cohere/v2/chat", "/v2/embed"])
def test_what_can_not_be_kept_apart_is_not_served(path: str) -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    body = orjson.dumps(chat("hi", texts=["x"]))
    who = Tenant(TenantSpec("a", salted=True))
    refusal = refused(router.read(route(path), body, b"application/json", "id", who))
    assert (refusal.status, refusal.code) == (400, "not_isolated")
    unsalted = router.read(route(path), body, b"application/json", "id", Tenant(TenantSpec("b")))
    assert isinstance(unsalted, RequestInfo)


# Models and stored responses


def test_a_model_that_is_not_for_it_is_403() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w", model="m"), spec("v", model="n")))
    who = Tenant(TenantSpec("a", models=frozenset(["n"])))

    def answer(**fields: Any) -> Any:
        body = orjson.dumps(chat("hi", **fields))
        return router.read(route(), body, b"application/json", "id", who)

    refusal = refused(answer(model="m"))
    assert (refusal.status, refusal.code, refusal.param) == (403, "model_not_allowed", "model")
    assert answer(model="n").model == "n"
    assert answer().model == "n", "the only one that it may use"
    unknown = refused(answer(model="x"))
    assert unknown.status == 404
    assert "serves: n." in unknown.message, "others' models are not its business"


@pytest.mark.parametrize(
    "said",
    ['"n"', '""', "null", '"m", "model": null', '"m", "model": "n"', '"m", "mod\\u0065l": "n"'],
)
def test_a_worker_is_told_the_model_that_a_tenant_was_judged_by(said: str) -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    router.fleet.roster.set_served("w", {"m": 4096, "n": 4096, "o": 4096}, 4096)
    body = f'{{"model": {said}, "messages": []}}'.encode()

    def read_for(who: Tenant, body: bytes) -> RequestInfo:
        ask = router.read(route(), body, b"application/json", "id", who)
        assert isinstance(ask, RequestInfo)
        assert ask.model == "n"
        return ask

    for each in (body, b'{"messages": []}'):
        fields = present(read_for(Tenant(TenantSpec("a", models=frozenset(["n"]))), each).fields)
        pairs = json.loads(spliced(each, fields), object_pairs_hook=list)
        assert {value for name, value in pairs if name == "model"} == {"n"}
    if said.endswith('"n"'):
        assert read_for(Tenant(TenantSpec("b")), body).fields is None


def test_a_form_of_a_tenant_names_its_model_plainly() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w")))
    router.fleet.roster.set_served("w", {"m": 4096, "n": 4096}, 4096)
    some, every = Tenant(TenantSpec("a", models=frozenset(["n"]))), Tenant(TenantSpec("b"))
    plain, other = (
        (b'Content-Disposition: form-data; name="model"', name) for name in (b"n", b"m")
    )
    unquoted = (b"Content-Disposition: form-data; name=model", b"m")

    def answer(who: Tenant, *parts: tuple[bytes, bytes]) -> Any:
        path = route("/v1/audio/transcriptions")
        return router.read(path, form(*parts), TYPE, "id", who)

    assert answer(some, plain).model == "n"
    assert refused(answer(some, other)).status == 403
    for parts in ((), (plain, other), (plain, unquoted)):
        refusal = refused(answer(some, *parts))
        assert (refusal.status, refusal.param) == (400, "model")
    assert answer(every, plain, unquoted).model == "n"


def test_a_stored_response_is_its_tenants_own() -> None:
    router = Router(RouterSettings(), fleet_of(spec("w"), spec("v")))
    a, b = (Tenant(TenantSpec(name)) for name in "ab")
    router.remember("resp_1", "v", a)

    def fetched(tenant: Tenant | None, response: str = "resp_1") -> Any:
        path = route(f"/v1/responses/{response}", "GET")
        return router.read(path, b"", b"", "id", tenant)

    def followed(tenant: Tenant | None) -> Any:
        body = orjson.dumps({"input": "go on", "previous_response_id": "resp_1"})
        return router.read(route("/v1/responses"), body, b"application/json", "id", tenant)

    for answer in (fetched(a), followed(a)):
        assert answer.pinned == "v"
        assert answer.tenant is a
    for answer in (fetched(b), followed(b), fetched(a, "resp_2")):
        refusal = refused(answer)
        assert (refusal.status, refusal.code) == (404, "response_not_found")
    assert fetched(None).pinned == ""

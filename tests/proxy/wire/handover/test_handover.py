"""A request on two workers: the bodies of both legs and the response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.config import TransferConfig
from proxy.core.model.role import Role
from proxy.core.request.json_edit import members
from proxy.transfer.registry import connector
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.kv import CHAT, COMPLETIONS, OPENINGS
from tests.proxy.wire.pairs import Pairs, ask, chat_body, completion_body, expected, pairs, words
from tests.proxy.wire.raw_client import get, request
from tests.proxy.wire.site import Fake, Site

MAKERS = {CHAT: chat_body, COMPLETIONS: completion_body}


def raw_members(body: bytes) -> dict[bytes, bytes]:
    """Return a body's members as written, in order."""
    return {member.name: body[member.value : member.end] for member in members(body)}


@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize("stream", [True, False])
async def test_handover_response_equals_that_of_one_worker(
    start: Start, path: str, stream: bool
) -> None:
    here = await pairs(start)
    for _ in range(5):
        await here.check_served(MAKERS[path](stream=stream), path=path)
    assert here.kv.ends() == ["read"] * 5
    assert here.site.metrics.handovers.tokens["tiny"] > 0
    assert sorted(leg.split()[0] for leg in here.legs()) == ["decode"] * 5 + ["prefill"] * 5
    seen = [set(phase.seen) for phase in here.site.metrics.phases.values()]
    wanted = [{"queue", "prefill_leg", "transfer", "decode"}] if stream else [set()]
    assert seen == wanted


ODD = (
    b' {"temperature": 0.70000, "messages" : [{"role":"user","content":"caf\\u00e9 \xc3\xa9 '
    b'\\"max_tokens\\": 9 ' + b"x" * 300 + b'"}],\n '
    b'"max_tokens"\t: 4,"top_p":1.0e0, "stream": true ,\n'
    b'"stream_options": {"include_usage": false}, "min_tokens":2, "user":null, "model":"tiny" } \n'
)


async def test_legs_keep_the_clients_bytes_except_transfer_fields(here: Pairs) -> None:
    await here.check_served(ODD)
    assert here.legs() == ["prefill p0", "decode d0"]
    prefill, decode = here.site.served()
    original, first, second = map(raw_members, (ODD, prefill.body, decode.body))
    changed = {b"max_tokens": b"1", b"stream": b"false", b"min_tokens": b"1"}
    added = set(first) - set(original)
    assert added <= {b"kv_transfer_params", b"max_completion_tokens"}
    assert {name: first[name] for name in first if name not in added} == {
        name: changed.get(name, text)
        for name, text in original.items()
        if name != b"stream_options"
    }
    assert set(second) - set(original) == {b"kv_transfer_params"}
    end = ODD.rindex(b"}")
    at = decode.body.rindex(b"}")
    assert decode.body[at:] == ODD[end:]
    assert decode.body.startswith(ODD[:end].rstrip())


async def test_both_legs_have_the_headers_and_the_same_id(here: Pairs) -> None:
    trace = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = (b"X-Request-Id: mine", b"Authorization: Bearer theirs", trace, b"X-Other: kept")
    answer = await ask(here, chat_body(), *headers)
    assert answer.one(b"x-request-id") == b"mine"
    await here.settled()
    for call in here.site.served():
        for header in headers:
            name, _, value = header.partition(b": ")
            assert call.all(name) == [value]
    await here.check_served()
    first, second = (call.all(b"x-request-id") for call in here.site.served()[2:])
    assert first == second != [b"mine"]
    assert len(first) == 1


def other_body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": "z" * 300, **fields}).encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion_body(stream=True, prompt=["a" * 100, "b" * 100])),
        (COMPLETIONS, completion_body(stream=True, echo=True, logprobs=0)),
        (CHAT, chat_body(stream=True, n=3)),
        (CHAT, chat_body(stream=True, max_completion_tokens=1)),
        ("/v1/responses", other_body(background=True)),
        ("/v1/responses", other_body(tools=[{"type": "web_search"}])),
        ("/v1/embeddings", other_body()),
        ("/inference/v1/generate", other_body(token_ids=[1] * 300, sampling_params={"n": 1})),
    ],
)
async def test_request_that_cannot_be_split_is_served_whole(
    here: Pairs, path: str, body: bytes
) -> None:
    """The other cases are in tests/proxy/core/request/test_split_check.py."""
    assert (await ask(here, body, path=path)).status == 200
    await here.settled()
    assert here.legs() == ["whole d0"]
    assert here.site.served()[0].body == body


OTHER_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/messages": ("max_tokens", {"messages": [{"role": "user", "content": "z" * 300}]}),
    "/cohere/v2/chat": ("max_tokens", {"messages": [{"role": "user", "content": "z" * 300}]}),
    "/v1/responses": ("max_output_tokens", {"input": "z" * 300}),
}


@pytest.mark.parametrize("path", OTHER_ROUTES)
@pytest.mark.parametrize("stream", [True, False])
async def test_other_routes_use_their_own_limit_field(here: Pairs, path: str, stream: bool) -> None:
    limit, fields = OTHER_ROUTES[path]
    body = json.dumps({"model": "tiny", **fields, limit: 4, "stream": stream}).encode()
    answer = await ask(here, body, path=path)
    assert answer.status == 200
    await here.settled()
    assert here.legs() == ["prefill p0", "decode d0"]
    prefill, decode = (call.json() for call in here.site.served())
    assert prefill[limit] == 1
    assert prefill["stream"] is False
    stored: set[str] = {"store"} if path == "/v1/responses" else set()
    assert set(prefill) - set(fields) == {"model", limit, "stream", "kv_transfer_params"} | stored
    assert not prefill.get("store")  # no client knows the ID of a prefill
    assert decode.pop("kv_transfer_params")
    assert decode == json.loads(body)


async def test_concurrent_equal_prompts_are_prefilled_twice(start: Start) -> None:
    """The decode worker has the prompt's prefix only after the first transfer."""
    here = await pairs(start, prefills=1, decodes=1, disaggregate_above=500)
    body = chat_body(stream=True, messages=[{"role": "user", "content": "z" * 8000}])
    gates = [here.hold("p0") for _ in range(2)]
    clients = [await here.send(body) for _ in range(2)]
    await here.site.fakes["p0"].got(2)
    for gate in gates:
        gate.set()
    for client in clients:
        assert words(await client.answer()) == expected(body)
        client.close()
    await here.check_served(body)
    assert sorted(here.legs()[:4]) == ["decode d0"] * 2 + ["prefill p0"] * 2
    assert here.legs()[4:] == ["whole d0"]


def answer_with_usage(cached: int) -> Script:
    """Answer a chat with a usage that has this number of cached tokens."""
    usage = scripts.usage(1600, 4) | {"prompt_tokens_details": {"cached_tokens": cached}}

    async def run(call: Call) -> None:
        if call.json().get("stream"):
            pieces = OPENINGS[CHAT], scripts.token("a"), scripts.event({"usage": usage})
            chunks = b"".join(map(scripts.chunk, pieces))
            await call.send(scripts.STREAM_HEAD + chunks + scripts.LAST_CHUNK)
        else:
            await scripts.answer(body=json.dumps({"usage": usage}).encode())(call)

    return run


@pytest.mark.parametrize("stream", [True, False])
async def test_cached_tokens_are_those_of_the_prefill_worker(here: Pairs, stream: bool) -> None:
    here.site.wire.connector = connector(TransferConfig(connector="shared-storage"))
    for name, cached in (("p0", 9), ("d0", 1536)):
        here.site.fakes[name].always(answer_with_usage(cached))
    answer = await ask(here, chat_body(stream=stream))
    usage = json.loads(answer.body.rstrip().rpartition(b"data: ")[2])["usage"]
    assert usage == scripts.usage(1600, 4) | {"prompt_tokens_details": {"cached_tokens": 9}}
    assert [call.json().get("stream") for call in here.site.served()] == [False, stream]
    await here.site.settled()
    assert here.site.metrics.handovers.ends == {"prefilled": 1, "transferred": 1}


# Transfer fields of clients

ADDRESS_ID = b"___prefill_addr_10.6.6.6:1___decode_addr_10.6.6.7:2_x"
REMOTE_PARAMS = {"do_remote_prefill": True, "remote_host": "10.6.6.6"}


def body_with(**fields: Any) -> bytes:
    """Return a chat's body with these fields and a prompt that quotes a transfer field."""
    messages = [{"role": "user", "content": "kv_transfer_params in a prompt"}]
    return json.dumps({"model": "tiny", "messages": messages} | fields).encode()


async def test_allow_client_kv_transfer_passes_the_fields(start: Start) -> None:
    site = await start(router={"allow_client_kv_transfer": True})
    body = body_with(kv_transfer_params=REMOTE_PARAMS)
    assert (await site.ask(request(body, b"X-Request-Id: " + ADDRESS_ID))).status == 200
    [call] = site.served()
    assert call.body == body
    assert call.all(b"x-request-id") == [ADDRESS_ID]


async def test_request_id_that_names_addresses_is_replaced(site: Site) -> None:
    answer = await site.ask(request(body_with(), b"X-Request-Id: " + ADDRESS_ID))
    [call] = site.served()
    [own] = call.all(b"x-request-id")
    assert b"addr" not in own
    assert answer.one(b"x-request-id") == own


async def test_router_with_prefill_workers_alone_is_not_ready(start: Start) -> None:
    site = await start(Fake("p0", Role.PREFILL), Fake("d0", Role.DECODE, up=False))
    assert (await site.ask(get("/ready"))).status == 503
    assert (await site.ask(get("/health"))).status == 200
    site.up("d0")
    assert (await site.ask(get("/ready"))).status == 200

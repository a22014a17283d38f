"""Tenants: keys, limits and billing as clients and workers see them."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, TenantSpec
from proxy.http.request_parser import ParserState
from proxy.telemetry.logs import account
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import CACHED, Faults
from tests.proxy.wire.pairs import Pairs, ask, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import chat, get, request
from tests.proxy.wire.site import Fake, Site, eventually

KEY, OTHER = "sk-vs-aaaaaaaaaaaaaaaa", "sk-vs-bbbbbbbbbbbbbbbb"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def bearer(key: str = KEY) -> bytes:
    return b"Authorization: Bearer " + key.encode()


def set_tenants(site: Site, *specs: TenantSpec, **keys: str) -> None:
    """Give the router these tenants and their keys."""
    hashes = {sha256(key.encode()).digest(): name for name, key in keys.items()}
    site.router.tenants.replace(specs, hashes)


@pytest.fixture
async def guarded(start: Start) -> Site:
    """Start a router with two tenants before a worker with its own key."""
    site = await start(Fake("w0", api_key="workers-own"))
    set_tenants(site, TenantSpec("a"), TenantSpec("b"), a=KEY, b=OTHER)
    return site


# 401


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ((), None),
        ((b"Authorization: Basic YTpi",), None),
        ((b"Authorization: Bearer",), None),
        ((b"Authorization: Bearer ",), None),
        ((bearer("sk-vs-unknown"),), "invalid_api_key"),
        ((bearer(KEY + "x"),), "invalid_api_key"),
        ((bearer(), bearer()), "invalid_api_key"),
        ((b"X-Api-Key: unknown",), "invalid_api_key"),
    ],
)
async def test_missing_or_unknown_key_gets_401(
    guarded: Site, headers: tuple[bytes, ...], code: str
) -> None:
    client = await guarded.client()
    answer = await client.ask(chat("hi", *headers))
    assert answer.status == 401
    assert answer.one(b"www-authenticate") == b"Bearer"
    error = answer.error()
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert b"sk-vs" not in answer.body, "keys are not repeated"
    assert guarded.served() == []
    assert (await client.ask(chat("hi", bearer()))).status == 200, "the connection stays open"


@pytest.mark.parametrize(
    "header",
    [
        bearer(),
        b"authorization: bearer " + KEY.encode(),
        b"X-Api-Key: " + KEY.encode(),
        b"api-key:" + KEY.encode(),
    ],
)
async def test_key_is_accepted_in_each_header(guarded: Site, header: bytes) -> None:
    assert (await guarded.ask(chat("hi", header))).status == 200
    assert (await guarded.ask(get("/v1/models", header))).status == 200


async def test_body_without_a_key_is_not_collected(guarded: Site) -> None:
    client = await guarded.client()
    answer = await client.ask(chat("x" * 3_000_000))
    assert answer.status == 401
    assert guarded.wire.collecting.held == 0


async def test_expect_continue_without_a_key_gets_401_before_the_body(guarded: Site) -> None:
    client = await guarded.client()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    await client.send(head + b"Content-Length: 1000000\r\n\r\n")
    assert (await client.answer()).status == 401


async def test_health_ready_and_metrics_need_no_key(guarded: Site) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert (await guarded.ask(get(path))).status == 200
    for path in ("/v1/models", "/nowhere", "/v1/files"):
        assert (await guarded.ask(get(path))).status == 401


# Reload


async def test_removed_key_is_refused_on_open_connections(guarded: Site) -> None:
    client = await guarded.client()
    for _ in range(3):  # the head is cached by then
        assert (await client.ask(chat("hi", bearer()))).status == 200
    set_tenants(guarded, TenantSpec("a"), a=OTHER)
    assert (await client.ask(chat("hi", bearer()))).status == 401
    assert (await client.ask(chat("hi", bearer(OTHER)))).status == 200
    set_tenants(guarded, TenantSpec("a"), a=KEY)
    assert (await client.ask(chat("hi", bearer()))).status == 200


async def test_first_tenants_take_effect_on_open_connections(site: Site) -> None:
    client = await site.client()
    assert (await client.ask(chat("hi"))).status == 200
    assert (await client.ask(chat("hi"))).status == 200
    set_tenants(site, TenantSpec("a"), a=KEY)
    assert (await client.ask(chat("hi"))).status == 401


async def test_key_added_during_a_body_holds_from_the_next_request(guarded: Site) -> None:
    """The start of the body was not kept, so the rest is skipped."""
    client = await guarded.client()
    whole = chat("x" * 5000, bearer("sk-vs-cccccccccccccccc"))
    await client.send(whole[:2000])
    await eventually(lambda: any(c._reader.state is ParserState.BODY for c in guarded.wire.clients))
    set_tenants(guarded, TenantSpec("c"), c="sk-vs-cccccccccccccccc")
    assert (await client.ask(whole[2000:])).status == 401
    assert [(await client.ask(whole)).status for _ in range(2)] == [200, 200]


# Requests as workers get them


@pytest.mark.parametrize("api_key", ["workers-own", None])
async def test_client_key_is_not_sent_to_workers(start: Start, api_key: str | None) -> None:
    site = await start(Fake("w0", api_key=api_key))
    set_tenants(site, TenantSpec("a"), a=KEY)
    for headers in ((bearer(),), (b"X-Api-Key: " + KEY.encode(),), (bearer(), b"Api-Key: x")):
        assert (await site.ask(chat("hi", *headers))).status == 200
    for call in site.served():
        assert KEY.encode() not in call.head
        assert call.all(b"x-api-key") == call.all(b"api-key") == []
        assert call.all(b"authorization") == ([b"Bearer workers-own"] if api_key else [])


async def test_headers_that_control_an_engine_are_removed(guarded: Site) -> None:
    headers = (
        b"X-Vllm-Priority: -9",
        b"x-data-parallel-rank: 3",
        b"endpoint-load-metrics-format: JSON",
        b"X-Session-Id: s",
    )
    assert (await guarded.ask(chat("hi", bearer(), *headers))).status == 200
    (call,) = guarded.served()
    names = {name for name, _ in call.headers}
    assert not names & {
        b"x-vllm-priority",
        b"x-data-parallel-rank",
        b"endpoint-load-metrics-format",
    }
    assert b"x-session-id" in names


async def test_cache_salt_differs_between_tenants(start: Start) -> None:
    site = await start(router={"pass_priority": True})
    set_tenants(
        site,
        TenantSpec("a", Rank.INTERACTIVE, salted=True),
        TenantSpec("b", Rank.BATCH, salted=True),
        a=KEY,
        b=OTHER,
    )
    for key in (KEY, KEY, OTHER):
        assert (await site.ask(chat("hi", bearer(key)))).status == 200
    assert (await site.ask(chat("hi", bearer(OTHER), cache_salt="guess"))).status == 200
    bodies = [call.json() for call in site.served()]
    first, again, other, guess = (body["cache_salt"] for body in bodies)
    assert first == again
    assert len({first, other, guess, "guess"}) == 4
    assert [body["priority"] for body in bodies] == [-1, -1, 1, 1]


async def test_tenant_sees_and_uses_only_its_models(start: Start) -> None:
    site = await start(Fake("w0", model="tiny"), Fake("w1", model="large"))
    set_tenants(site, TenantSpec("a", models=frozenset(["tiny"])), TenantSpec("b"), a=KEY, b=OTHER)

    async def names(key: str) -> list[str]:
        answer = await site.ask(get("/v1/models", bearer(key)))
        return [card["id"] for card in answer.json()["data"]]

    assert await names(KEY) == ["tiny"]
    assert await names(OTHER) == ["tiny", "large"]
    for key, name, status in ((KEY, "tiny", 200), (KEY, "large", 403), (OTHER, "large", 200)):
        assert (await site.ask(get(f"/v1/models/{name}", bearer(key)))).status == status
    assert (await site.ask(get("/v1/models/tiny"))).status == 401
    refused = await site.ask(chat("hi", bearer(), model="large"))
    assert refused.status == 403
    assert refused.error()["code"] == "model_not_allowed"


# Limits


async def test_exceeded_limit_gets_429_with_retry_after(start: Start) -> None:
    site = await start()
    set_tenants(
        site, TenantSpec("a", limits=Limits(requests_per_minute=2)), TenantSpec("b"), a=KEY, b=OTHER
    )
    client = await site.client()
    statuses = [(await client.ask(chat("hi", bearer()))).status for _ in range(3)]
    assert statuses == [200, 200, 429]
    answer = await client.ask(chat("hi", bearer()))
    assert answer.error()["type"] == "rate_limit_error"
    assert answer.error()["code"] == "rate_limit_exceeded"
    wait = int(answer.one(b"retry-after"))
    assert 25 <= wait <= 30
    assert answer.one(b"x-ratelimit-limit-requests") == b"2"
    assert (await client.ask(chat("hi", bearer(OTHER)))).status == 200
    site.skip(wait)
    assert (await client.ask(chat("hi", bearer()))).status == 200


async def test_concurrency_is_released_on_every_exit(start: Start) -> None:
    site = await start(Fake("w0", max_requests=2))
    set_tenants(site, TenantSpec("a", limits=Limits(concurrency=3)), a=KEY)
    tenant = site.tenant()
    gate = site.fake.hold()
    clients = [await site.client() for _ in range(3)]
    for client in clients:
        await client.send(chat("hi", bearer()))
    await eventually(lambda: len(site.router.queue) == 1)
    assert (await site.ask(chat("hi", bearer()))).status == 429
    clients[2].close()
    await eventually(lambda: tenant.ledger.running == 2)
    clients[1].close()
    await eventually(lambda: tenant.ledger.running == 1)
    gate.set()
    assert (await clients[0].answer()).status == 200
    assert (tenant.ledger.running, tenant.waiting) == (0, 0)
    assert (await site.ask(chat("hi", bearer()))).status == 200


NO_JSON = request(b'{"messages": ', bearer())


async def test_limit_is_checked_before_the_body_is_parsed(guarded: Site) -> None:
    set_tenants(guarded, TenantSpec("a", limits=Limits(requests_per_minute=1)), a=KEY)
    assert [(await guarded.ask(NO_JSON)).status for _ in range(3)] == [400, 429, 429]
    assert (await guarded.ask(chat("hi", bearer()))).status == 429
    tenant = guarded.tenant()
    assert tenant.totals.limited == {"requests_per_minute": 3}
    set_tenants(guarded, TenantSpec("b", limits=Limits(tokens_per_minute=10)), b=KEY)
    assert (await guarded.ask(chat("hi", bearer()))).status == 200  # and exceeds its budget
    assert (await guarded.ask(NO_JSON)).status == 429


async def test_log_names_the_tenant_of_refused_requests(guarded: Site) -> None:
    set_tenants(guarded, TenantSpec("a", Rank.BATCH, limits=Limits(requests_per_minute=1)), a=KEY)
    records: list[dict[str, Any]] = []
    guarded.metrics.at_end = (lambda *of: records.append(account(*of)),)
    assert [(await guarded.ask(chat("hi", bearer()))).status for _ in range(2)] == [200, 429]
    assert (await guarded.ask(chat())).status == 401
    await eventually(lambda: len(records) == 3)
    lines = [(line["reason"], line["tenant"], line["class"]) for line in records[1:]]
    assert lines == [("limited", "a", "batch"), ("bad_key", None, None)]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"[]," * 200_000 + b"[]]}",
        b'{"messages": [], "kv_transfer_params": {"remote_host": "h"}}',
        b'{"model": "other", "messages": []}',
        chat("x" * 4000).partition(b"\r\n\r\n")[2],  # above max_prompt_tokens
    ],
)
async def test_refused_request_counts_against_the_rate_limit(guarded: Site, body: bytes) -> None:
    limits = Limits(requests_per_minute=1, max_prompt_tokens=100)
    set_tenants(guarded, TenantSpec("a", limits=limits), a=KEY)
    refused = request(body, bearer())
    assert 400 <= (await guarded.ask(refused)).status < 429
    assert (await guarded.ask(refused)).status == 429
    assert guarded.served() == []


# A worker counts its tokens: the estimate is near the 2,048 tokens of the first worker.
NEAR = chat("word " * 1600, bearer())


async def start_with_count(start: Start, limits: Limits) -> Site:
    """Start a router whose requests near a boundary are counted by a worker."""
    site = await start(
        Fake("w0", max_model_len=2048),
        Fake("w1"),
        router={"policy": "round_robin"},
        wire={"count_s": 60.0},  # long enough for a slow machine
    )
    set_tenants(site, TenantSpec("a", limits=limits), a=KEY)
    return site


def counts(site: Site) -> int:
    """Return the number of requests to `/tokenize`."""
    return sum(call.path == "/tokenize" for fake in site.fakes.values() for call in fake.calls)


async def test_request_above_a_limit_is_not_counted_by_a_worker(start: Start) -> None:
    site = await start_with_count(start, Limits(requests_per_minute=2))
    assert [(await site.ask(NEAR)).status for _ in range(5)] == [200, 200, 429, 429, 429]
    assert counts(site) == 2


async def test_prompt_surely_above_the_limit_is_not_counted_by_a_worker(start: Start) -> None:
    site = await start_with_count(start, Limits(max_prompt_tokens=100))
    assert (await site.ask(NEAR)).status == 400
    assert counts(site) == 0


async def test_request_being_counted_holds_concurrency(start: Start) -> None:
    site = await start_with_count(start, Limits(concurrency=1))
    for fake in site.fakes.values():
        fake.always(scripts.stall, "/tokenize")
    client = await site.send(NEAR)
    await eventually(lambda: counts(site) == 1)
    assert (await site.ask(NEAR)).status == 429
    assert counts(site) == 1
    client.close()
    await site.settled()
    for fake in site.fakes.values():
        fake.always(scripts.tokenize, "/tokenize")
    assert (await site.ask(NEAR)).status == 200
    tenant = site.tenant()
    assert tenant.ledger.running == 0


async def test_request_counted_as_too_long_gets_its_tokens_back(start: Start) -> None:
    site = await start_with_count(
        start, Limits(max_prompt_tokens=1900, tokens_per_minute=100_000, concurrency=1)
    )
    for _ in range(2):
        for fake in site.fakes.values():
            fake.always(scripts.answer(200, b'{"count": 1901, "tokens": []}'), "/tokenize")
        refused = await site.ask(NEAR)
        assert (refused.status, refused.error()["code"]) == (400, "context_length_exceeded")
    tenant = site.tenant()
    assert tenant.ledger.running == 0
    _, tokens = tenant.ledger.left(site.clock())
    assert tokens is not None
    assert tokens[1] == 100_000


@pytest.fixture
async def batched(start: Start) -> Site:
    """Start a router with a tenant before a worker that sends many tokens per event."""
    site = await start()
    set_tenants(site, TenantSpec("a"), a=KEY)
    site.fake.always(stream_few_events)
    return site


async def stream_few_events(call: Call) -> None:
    """Stream 800 tokens in three events, and usage on request in a separate event."""
    asked = call.json()
    await call.send(scripts.head(200, *STREAMED))
    for _ in range(3):
        await call.send(scripts.chunk(scripts.token("many ")))
    if asked.get("stream_options", {}).get("include_usage"):
        await call.send(scripts.chunk(scripts.usage_event(7, 800)))
    await call.send(scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)


STREAMED = ((b"content-type", scripts.SSE), (b"transfer-encoding", b"chunked"))
EVENTS = 3 * scripts.token("many ")


async def test_stream_with_few_events_is_billed_by_usage(batched: Site) -> None:
    """The router requests usage itself and removes it unless the client requested it."""
    tenant = batched.tenant()
    usage = scripts.usage_event(7, 800)
    cases: list[tuple[dict[str, Any], bytes]] = [
        ({}, b""),
        ({"stream_interval": 100_000}, b""),
        ({"stream_options": {"include_usage": False}, "stream_interval": 5}, b""),
        ({"stream_options": {"include_usage": True}, "stream_interval": 5}, usage),
    ]
    client = await batched.client()
    for number, (fields, extra) in enumerate(cases):
        answer = await client.ask(chat("hi", bearer(), stream=True, **fields))
        assert answer.status == 200
        assert answer.body == EVENTS + extra + scripts.DONE
        assert tenant.totals.output_tokens == 800 * (number + 1)
    for call in batched.served():
        assert call.json()["stream_options"] == {"include_usage": True}
        assert "stream_interval" not in call.json()


async def test_stream_options_are_unchanged_without_tenants(batched: Site) -> None:
    set_tenants(batched)
    fields = {"stream": True, "stream_interval": 5}
    data = chat("hi", **fields)
    answer = await batched.ask(data)
    assert answer.body == EVENTS + scripts.DONE
    (call,) = batched.served()
    assert data.endswith(b"\r\n\r\n" + call.body)


async def test_abandoned_stream_without_usage_is_billed_by_its_duration(start: Start) -> None:
    site = await start()
    set_tenants(site, TenantSpec("a"), a=KEY)
    tenant = site.tenant()
    worker = site.router.fleet.roster.get("w0")
    assert worker is not None
    worker.pace.base_s, worker.pace.each_s = 0.02, 0.0
    role = scripts.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    opening = scripts.head(200, *STREAMED) + scripts.chunk(role)
    site.fake.always(scripts.raw(opening, end="stall"))
    client = await site.send(chat("hi", bearer(), stream=True, max_tokens=5000))
    await eventually(lambda: any(e.record.sent_bytes for e in site.wire.exchanges))
    site.skip(60.0)
    client.close()
    await eventually(lambda: not site.wire.exchanges)
    assert 3000 <= tenant.totals.output_tokens < 5000


async def test_client_keys_reach_workers_after_the_last_tenant_is_removed(start: Start) -> None:
    site = await start()
    set_tenants(site, TenantSpec("a"), a=KEY)
    client = await site.client()
    headers = bearer(), b"X-Api-Key: other"
    for _ in range(2):  # the second head is cached
        assert (await client.ask(chat("hi", *headers))).status == 200
    set_tenants(site)
    for _ in range(2):
        assert (await client.ask(chat("hi", *headers))).status == 200
    received = [(call.all(b"authorization"), call.all(b"x-api-key")) for call in site.fake.served]
    assert received[:2] == [([], [])] * 2
    assert received[2:] == [([f"Bearer {KEY}".encode()], [b"other"])] * 2


async def test_x_explain_needs_the_tenants_permission(guarded: Site) -> None:
    """The permission also changes on open connections after a reload."""
    client = await guarded.client()
    data = chat("hi", bearer(), b"X-Explain: 1")
    for allowed in (False, True, False):
        set_tenants(guarded, TenantSpec("a", explain=allowed), TenantSpec("b"), a=KEY, b=OTHER)
        for _ in range(2):
            answer = await client.ask(data)
            assert answer.status == 200
            assert bool(answer.all(b"x-route")) is allowed
    assert not (await client.ask(chat("hi", bearer(OTHER), b"X-Explain: 1"))).all(b"x-route")


# Hand-overs


async def start_pairs(start: Start) -> Pairs:
    """Start pairs for two tenants, one of them with salted caches."""
    here = await pairs(start, prefills=1, decodes=2)
    limits = Limits(concurrency=1, tokens_per_minute=10_000)
    set_tenants(
        here.site, TenantSpec("a", limits=limits, salted=True), TenantSpec("b"), a=KEY, b=OTHER
    )
    return here


async def test_both_legs_carry_the_cache_salt_and_no_key(start: Start) -> None:
    here = await start_pairs(start)
    body = chat_body()
    assert words(await ask(here, body, bearer())) == expected(body)
    await here.settled()
    legs = here.site.served()
    assert here.kinds() == ["prefill", "decode"]
    salts = {call.json()["cache_salt"] for call in legs}
    assert len(salts) == 1
    assert all(call.all(b"authorization") == [] for call in legs)
    await ask(here, chat_body(), bearer(OTHER))
    assert all("cache_salt" not in call.json() for call in here.site.served()[2:])
    assert salts != {""}


@pytest.mark.parametrize("failing", [(), ("prefill",), ("decode",), ("prefill", "decode")])
async def test_handover_is_billed_and_released_once(start: Start, failing: tuple[str, ...]) -> None:
    here = await start_pairs(start)
    for role, how in zip(failing, (scripts.reset, scripts.error(500)), strict=False):
        here.kv.inject(role, Faults(during=how))  # the retry budget covers one reset
    body = chat_body()
    answer = await ask(here, body, bearer())
    assert words(answer) == expected(body)
    await here.settled()
    tenant = here.site.tenant()
    assert tenant.ledger.running == 0
    again = await ask(here, chat_body(), bearer())  # the tenant's concurrency is 1
    await here.settled()
    usages = [response.json()["usage"] for response in (answer, again)]
    totals = tenant.totals
    assert totals.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert totals.output_tokens == 8
    assert usages[1]["prompt_tokens_details"] == {"cached_tokens": CACHED}


@pytest.mark.parametrize("asks", [False, True])
async def test_streamed_handover_is_billed_by_usage(start: Start, asks: bool) -> None:
    here = await start_pairs(start)
    fields = {"stream_options": {"include_usage": True}} if asks else {}
    answer = await ask(here, chat_body(stream=True, **fields), bearer())
    await here.settled()
    assert here.kinds() == ["prefill", "decode"]
    assert answer.body.endswith(scripts.DONE)
    assert (b'"usage"' in answer.body) is asks
    tenant = here.site.tenant()
    assert tenant.totals.output_tokens == 4

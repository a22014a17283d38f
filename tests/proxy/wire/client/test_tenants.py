"""Tenants: keys, limits and billing as clients and workers see them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.tenants.limits import Decided, Limit, LimitExceeded, Limits
from proxy.core.tenants.tenants import Rank, TenantSpec
from proxy.http.request_parser import ParserState
from proxy.telemetry.logs import log_fields
from tests.present import present
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import CACHED, Faults
from tests.proxy.wire.pairs import Pairs, ask, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import KEY, OTHER_KEY, bearer, chat, get, request
from tests.proxy.wire.site import Fake, Site, eventually


@pytest.fixture
async def guarded(start: Start) -> Site:
    """Start a router with two tenants before a worker with its own key."""
    site = await start(Fake("w0", api_key="workers-own"))
    site.set_tenants(TenantSpec("a"), TenantSpec("b"), a=KEY, b=OTHER_KEY)
    return site


# 401


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ((), None),
        ((b"Authorization: Basic YTpi",), None),
        ((b"Authorization: Bearer ",), None),
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
    guarded.set_tenants(TenantSpec("a"), a=OTHER_KEY)
    assert (await client.ask(chat("hi", bearer()))).status == 401
    assert (await client.ask(chat("hi", bearer(OTHER_KEY)))).status == 200
    guarded.set_tenants(TenantSpec("a"), a=KEY)
    assert (await client.ask(chat("hi", bearer()))).status == 200


async def test_first_and_last_tenants_take_effect_on_open_connections(site: Site) -> None:
    client = await site.client()
    keyed = chat("hi", bearer(), b"X-Api-Key: other")
    for has_tenants in (False, True, False):
        site.set_tenants(*[TenantSpec("a")] * has_tenants, **{"a": KEY} if has_tenants else {})
        assert (await client.ask(keyed)).status == 200  # with the head of the turn before
        assert (await client.ask(chat("hi"))).status == (401 if has_tenants else 200)
        for _ in range(2):
            assert (await client.ask(keyed)).status == 200
    shown = [(call.all(b"authorization"), call.all(b"x-api-key")) for call in site.fake.served]
    passed, nothing = ([bearer().partition(b": ")[2]], [b"other"]), ([], [])
    assert shown == [
        passed,
        nothing,
        passed,
        passed,
        *[nothing] * 3,
        passed,
        nothing,
        passed,
        passed,
    ]


async def test_key_added_during_a_body_holds_from_the_next_request(guarded: Site) -> None:
    """The start of the body was not kept, so the rest is skipped."""
    client = await guarded.client()
    whole = chat("x" * 5000, bearer("sk-vs-cccccccccccccccc"))
    await client.send(whole[:2000])
    await eventually(lambda: any(c._reader.state is ParserState.BODY for c in guarded.wire.clients))
    guarded.set_tenants(TenantSpec("c"), c="sk-vs-cccccccccccccccc")
    assert (await client.ask(whole[2000:])).status == 401
    assert [(await client.ask(whole)).status for _ in range(2)] == [200, 200]


# Requests as workers get them


@pytest.mark.parametrize("api_key", ["workers-own", None])
async def test_keys_and_headers_that_control_an_engine_are_not_sent_to_workers(
    start: Start, api_key: str | None
) -> None:
    site = await start(Fake("w0", api_key=api_key))
    site.set_tenants(TenantSpec("a"), a=KEY)
    hidden = (
        b"X-Vllm-Priority: -9",
        b"x-data-parallel-rank: 3",
        b"endpoint-load-metrics-format: JSON",
    )
    for keys in ((bearer(), b"Api-Key: x"), (b"X-Api-Key: " + KEY.encode(),)):
        assert (await site.ask(chat("hi", *keys, *hidden, b"X-Session-Id: s"))).status == 200
    for call in site.served():
        assert KEY.encode() not in call.head
        assert not any(
            call.all(line.partition(b":")[0]) for line in (*hidden, b"X-Api-Key", b"Api-Key")
        )
        assert call.all(b"authorization") == ([b"Bearer workers-own"] if api_key else [])
        assert call.all(b"x-session-id") == [b"s"]


async def test_tenant_sees_and_uses_only_its_models(start: Start) -> None:
    site = await start(Fake("w0", model="tiny"), Fake("w1", model="large"))
    site.set_tenants(
        TenantSpec("a", models=frozenset(["tiny"])), TenantSpec("b"), a=KEY, b=OTHER_KEY
    )

    async def names(key: str) -> list[str]:
        answer = await site.ask(get("/v1/models", bearer(key)))
        return [card["id"] for card in answer.json()["data"]]

    assert await names(KEY) == ["tiny"]
    assert await names(OTHER_KEY) == ["tiny", "large"]
    for key, name, status in ((KEY, "tiny", 200), (KEY, "large", 403), (OTHER_KEY, "large", 200)):
        assert (await site.ask(get(f"/v1/models/{name}", bearer(key)))).status == status
    assert (await site.ask(get("/v1/models/tiny"))).status == 401
    refused = await site.ask(chat("hi", bearer(), model="large"))
    assert refused.status == 403
    assert refused.error()["code"] == "model_not_allowed"


# Limits


async def test_exceeded_limit_gets_429_with_retry_after(site: Site) -> None:
    site.set_tenants(
        TenantSpec("a", limits=Limits(requests_per_minute=2)), TenantSpec("b"), a=KEY, b=OTHER_KEY
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
    assert (await client.ask(chat("hi", bearer(OTHER_KEY)))).status == 200
    site.skip(wait)
    assert (await client.ask(chat("hi", bearer()))).status == 200


async def test_concurrency_is_released_on_every_exit(start: Start) -> None:
    site = await start(Fake("w0", max_requests=2))
    site.set_tenants(TenantSpec("a", limits=Limits(concurrency=3)), a=KEY)
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
    guarded.set_tenants(TenantSpec("a", limits=Limits(requests_per_minute=1)), a=KEY)
    assert [(await guarded.ask(NO_JSON)).status for _ in range(3)] == [400, 429, 429]
    assert (await guarded.ask(chat("hi", bearer()))).status == 429
    tenant = guarded.tenant()
    assert tenant.totals.limited == {"requests_per_minute": 3}
    guarded.set_tenants(TenantSpec("b", limits=Limits(tokens_per_minute=10)), b=KEY)
    assert (await guarded.ask(chat("hi", bearer()))).status == 200  # and exceeds its budget
    assert (await guarded.ask(NO_JSON)).status == 429


async def test_log_names_the_tenant_of_refused_requests(guarded: Site) -> None:
    guarded.set_tenants(TenantSpec("a", Rank.BATCH, limits=Limits(requests_per_minute=1)), a=KEY)
    records: list[dict[str, Any]] = []
    guarded.metrics.at_end = (lambda *of: records.append(log_fields(*of)),)
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
    guarded.set_tenants(TenantSpec("a", limits=limits), a=KEY)
    refused = request(body, bearer())
    assert 400 <= (await guarded.ask(refused)).status < 429
    assert (await guarded.ask(refused)).status == 429
    assert guarded.served() == []


@pytest.fixture
async def batched(site: Site) -> Site:
    """Start a router with a tenant before a worker that sends many tokens per event."""
    site.set_tenants(TenantSpec("a"), a=KEY)
    site.fake.always(stream_few_events)
    return site


async def stream_few_events(call: Call) -> None:
    """Stream 800 tokens in three events, and usage on request in a separate event."""
    asked = call.json()
    await call.send(scripts.STREAM_HEAD)
    for _ in range(3):
        await call.send(scripts.chunk(scripts.token("many ")))
    if asked.get("stream_options", {}).get("include_usage"):
        await call.send(scripts.chunk(scripts.usage_event(7, 800)))
    await call.send(scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)


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


async def test_abandoned_stream_without_usage_is_billed_by_its_duration(site: Site) -> None:
    site.set_tenants(TenantSpec("a"), a=KEY)
    tenant = site.tenant()
    site.worker().pace.base_s, site.worker().pace.sequence_s = 0.02, 0.0
    role = scripts.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    opening = scripts.STREAM_HEAD + scripts.chunk(role)
    site.fake.always(scripts.raw(opening, end="stall"))
    client = await site.send(chat("hi", bearer(), stream=True, max_tokens=5000))
    await eventually(lambda: any(e.record.sent_bytes for e in site.wire.exchanges))
    site.skip(60.0)
    client.close()
    await eventually(lambda: not site.wire.exchanges)
    assert 3000 <= tenant.totals.output_tokens < 5000


async def test_x_explain_needs_the_tenants_permission(guarded: Site) -> None:
    """The permission also changes on open connections after a reload."""
    client = await guarded.client()
    data = chat("hi", bearer(), b"X-Explain: 1")
    for allowed in (False, True, False):
        guarded.set_tenants(TenantSpec("a", explain=allowed), TenantSpec("b"), a=KEY, b=OTHER_KEY)
        for _ in range(2):
            answer = await client.ask(data)
            assert answer.status == 200
            assert bool(answer.all(b"x-route")) is allowed
    assert not (await client.ask(chat("hi", bearer(OTHER_KEY), b"X-Explain: 1"))).all(b"x-route")


# Hand-overs


async def start_pairs(start: Start) -> Pairs:
    """Start pairs for two tenants, one of them with salted caches."""
    here = await pairs(start, prefills=1, decodes=2)
    limits = Limits(concurrency=1, tokens_per_minute=10_000)
    here.site.set_tenants(
        TenantSpec("a", limits=limits, salted=True), TenantSpec("b"), a=KEY, b=OTHER_KEY
    )
    return here


async def test_both_legs_carry_the_cache_salt_and_no_key(start: Start) -> None:
    here = await start_pairs(start)
    body = chat_body()
    await here.check_served(body, bearer())
    legs = here.site.served()
    assert here.kinds() == ["prefill", "decode"]
    salts = {call.json()["cache_salt"] for call in legs}
    assert len(salts) == 1
    assert all(call.all(b"authorization") == [] for call in legs)
    await ask(here, chat_body(), bearer(OTHER_KEY))
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


# Limits that all hosts decide together


class OtherHosts:
    """Hosts that decide later whether a request exceeds its tenant's limits."""

    is_fresh = True

    def __init__(self) -> None:
        self.decide: Decided | None = None
        self.dropped = False

    def take_from_advance(self, tokens: int) -> bool:  # noqa: ARG002
        return False

    def request_decision(self, tokens: int, done: Decided) -> OtherHosts:  # noqa: ARG002
        self.decide = done
        return self

    def drop(self) -> None:
        self.dropped = True

    def charge(self, requests: int, tokens: int, *, soon: bool) -> None:
        """Ignore the charge."""


@pytest.mark.parametrize(
    ("exceeded", "status"),
    [(None, 200), (LimitExceeded(Limit.REQUESTS, 9, 7.0), 429), ("client leaves", 0)],
    ids=["accepted", "refused", "client leaves"],
)
async def test_request_waits_for_the_decision_of_all_hosts(
    guarded: Site, exceeded: Any, status: int
) -> None:
    hosts = OtherHosts()
    guarded.set_tenants(TenantSpec("a", limits=Limits(requests_per_minute=9)), a=KEY)
    guarded.tenant().ledger.remote_limits = hosts
    client = await guarded.send(chat("hi", bearer()))
    await eventually(lambda: hosts.decide is not None)
    assert guarded.served() == []
    if not status:
        client.close()
        await eventually(lambda: hosts.dropped)
        return
    present(hosts.decide)(exceeded)
    assert (await client.answer()).status == status
    assert guarded.tenant().ledger.running == 0
    assert not hosts.dropped

"""Token counts requested from a worker, for prompts near a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import TenantSpec
from proxy.http.response_parser import ResponseHead
from proxy.wire.exchange import tokenize
from proxy.wire.exchange.tokenize import TokenizeRequest
from tests.present import present
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import KEY, bearer, chat
from tests.proxy.wire.site import Fake, Site, eventually

# Estimated at about 2,000 tokens, plus 16 of output: near the 2,048 tokens of the first worker.
NEAR = chat("word " * 1600, bearer())
ROUND_ROBIN = {"policy": "round_robin"}


async def start_counting(
    start: Start, script: Script = scripts.tokenize, *, count_s: float = 60.0, **options: Any
) -> Site:
    """Start two workers that answer requests for counts with a script."""
    fakes = Fake("w0", max_model_len=2048, **options), Fake("w1", **options)
    site = await start(*fakes, router=ROUND_ROBIN, wire={"count_s": count_s})
    for fake in site.fakes.values():
        fake.always(script, "/tokenize")
    return site


def counts(site: Site) -> list[Call]:
    """Return the requests for counts."""
    return [call for fake in site.fakes.values() for call in fake.calls if call.path == "/tokenize"]


@pytest.mark.parametrize(("tokens", "served"), [(5000, 0), (1000, 1)])
async def test_prompt_near_a_boundary_is_counted_by_a_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch, tokens: int, served: int
) -> None:
    beginning, rest = b'{"count": ', b"%d}" % tokens
    monkeypatch.setattr(tokenize, "MAX_RESPONSE_BYTES", len(beginning))
    head = scripts.head(200, (b"content-length", b"%d" % len(beginning + rest)))
    script = scripts.raw(head + beginning, rest, gap_s=0.02)
    site = await start_counting(start, script, api_key="secret")
    site.always(scripts.stream(3))  # without usage
    for _ in range(2):
        assert (await site.ask(NEAR)).status == 200
        [count] = counts(site)  # the estimate has learned from it
    assert count.all(b"authorization") == [b"Bearer secret"]
    assert len(site.fakes["w0"].served) == served


NO_COUNTS: dict[str, Script] = {
    "stall": scripts.stall,
    "reset": scripts.reset,
    "500": scripts.error(500),
    "201": scripts.answer(201, b'{"count": 5}'),
    "no JSON": scripts.answer(200, b'{"count": 5'),
    "a list": scripts.answer(200, b"[5]"),
    "no count": scripts.answer(200, b'{"max_model_len": 5}'),
    "text": scripts.answer(200, b'{"count": "5"}'),
    "negative": scripts.answer(200, b'{"count": -1}'),
    "endless": scripts.raw(scripts.head(200) + b'{"count": 5}' + b" " * (1 << 21), end="stall"),
}


@pytest.mark.parametrize("name", NO_COUNTS)
async def test_missing_count_is_replaced_by_the_estimate(start: Start, name: str) -> None:
    count_s = 0.1 if name == "stall" else 60.0
    site = await start_counting(start, NO_COUNTS[name], count_s=count_s)
    for number in range(1, 3):
        assert (await site.ask(NEAR)).status == 200
        assert len(counts(site)) == number
    assert site.fakes["w0"].served == []  # the prompt may be too long for it


async def test_long_body_is_not_sent_for_a_count(start: Start) -> None:
    site = await start(Fake("w0", max_model_len=65536), Fake("w1", max_model_len=131072))
    assert (await site.ask(chat("word " * 50_000))).status == 200
    assert counts(site) == []


def test_count_may_be_zero_gets_no_extra_time_and_is_dropped_without_a_connection() -> None:
    counted: list[int | None] = []
    count = TokenizeRequest(9.0, lambda _, tokens: counted.append(tokens))
    assert count.extra_wait_s(9.0) == 0.0
    count.drop()
    assert counted == []
    head = ResponseHead()
    head.status = 200
    count.response_begun(1.0, head)
    count.body_received(2.0, b'{"count": 0}', ended=True)
    assert counted == [0]


async def test_request_that_leaves_while_it_is_counted_has_no_request(start: Start) -> None:
    site = await start_counting(start, scripts.stall)
    client = await site.send(NEAR)
    await eventually(lambda: counts(site))
    client.close()
    [call] = counts(site)
    await call.was_lost()
    await site.settled()
    await asyncio.sleep(0.05)
    assert site.served() == []


# Tenants' limits


async def start_limited(start: Start, limits: Limits, script: Script = scripts.tokenize) -> Site:
    """Start the workers for a tenant."""
    site = await start_counting(start, script)
    site.set_tenants(TenantSpec("a", limits=limits), a=KEY)
    return site


@pytest.mark.parametrize(
    ("limits", "statuses", "counted"),
    [
        (Limits(requests_per_minute=2), [200, 200, 429, 429], 2),
        (Limits(max_prompt_tokens=100), [400], 0),  # surely above it
    ],
)
async def test_request_above_a_limit_is_not_counted_by_a_worker(
    start: Start, limits: Limits, statuses: list[int], counted: int
) -> None:
    site = await start_limited(start, limits)
    assert [(await site.ask(NEAR)).status for _ in statuses] == statuses
    assert len(counts(site)) == counted


async def test_request_being_counted_holds_concurrency(start: Start) -> None:
    site = await start_limited(start, Limits(concurrency=1), scripts.stall)
    client = await site.send(NEAR)
    await eventually(lambda: counts(site))
    assert (await site.ask(NEAR)).status == 429
    assert len(counts(site)) == 1
    client.close()
    await site.settled()
    for fake in site.fakes.values():
        fake.always(scripts.tokenize, "/tokenize")
    assert (await site.ask(NEAR)).status == 200
    assert site.tenant().ledger.running == 0


async def test_request_counted_as_too_long_gets_its_tokens_back(start: Start) -> None:
    limits = Limits(max_prompt_tokens=1900, tokens_per_minute=100_000, concurrency=1)
    too_long = scripts.answer(200, b'{"count": 1901, "tokens": []}')
    site = await start_limited(start, limits, too_long)
    for _ in range(2):
        refused = await site.ask(NEAR)
        assert (refused.status, refused.error()["code"]) == (400, "context_length_exceeded")
    ledger = site.tenant().ledger
    assert ledger.running == 0
    assert present(ledger.remaining(site.clock())[1])[1] == 100_000

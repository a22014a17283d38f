"""Deadlines that clients send, and the targets that workers get."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.tenants.tenants import Rank, TenantSpec
from proxy.wire.exchange.targets import MAX_MS
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import KEY, bearer, chat
from tests.proxy.wire.site import Fake, Site, eventually

TARGETS = AdmissionSettings({Rank.STANDARD: 30.0}, {Rank.STANDARD: 0.05})


def within(milliseconds: object) -> bytes:
    return f"X-Request-Deadline-Ms: {milliseconds}".encode()


async def sent(site: Site, *headers: bytes, **fields: Any) -> tuple[dict[str, Any], Any]:
    """Send a chat; return its body and its head as the worker got them."""
    client = await site.client()
    assert (await client.ask(chat("hi", *headers, **fields))).status == 200
    call = site.fake.served[-1]
    return call.json(), call


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "soon", MAX_MS + 1, "9" * 50])
async def test_bad_deadline_is_400_with_its_range(site: Site, value: object) -> None:
    client = await site.client()
    answer = await client.ask(chat("hi", within(value)))
    assert answer.status == 400
    error = answer.error()
    assert error["param"] == "X-Request-Deadline-Ms"
    assert f"milliseconds from 1 to {MAX_MS}" in error["message"]
    assert (await client.ask(chat())).status == 200, "the connection stays open"


async def test_deadline_does_not_reach_the_worker_by_default(site: Site) -> None:
    body, call = await sent(site, within(60_000))
    assert "vllm_xargs" not in body
    assert not any(name.lower() == b"x-request-deadline-ms" for name, _ in call.headers)


async def test_deadline_is_ignored_if_the_operator_says_so(start: Start) -> None:
    site = await start(wire={"client_deadlines": False, "pass_targets": True})
    body, _ = await sent(site, within("soon"))
    assert "vllm_xargs" not in body


async def test_worker_gets_what_is_left(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1), wire={"pass_targets": True})
    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.answer()))
    first, second = await site.client(), await site.client()
    await first.send(chat())
    await site.fake.got()
    await second.send(chat("hi", within(60_000)))
    await eventually(lambda: len(site.router.queue) == 1)
    await asyncio.sleep(0.002)  # time in the queue is not the engine's
    gate.set()
    for client in (first, second):
        assert (await client.answer()).status == 200
    left = site.fake.served[-1].json()["vllm_xargs"]
    assert left.keys() == {"deadline_ms"}
    assert 0 < left["deadline_ms"] < 60_000
    assert "vllm_xargs" not in site.fake.served[0].json()


async def test_clients_own_arguments_are_kept(start: Start) -> None:
    site = await start(wire={"pass_targets": True})
    body, _ = await sent(site, within(60_000), vllm_xargs={"lane": "batch"})
    assert body["vllm_xargs"] == {"lane": "batch"}


@pytest.mark.parametrize(
    ("admission", "asked_ms", "least_ms", "most_ms"),
    [
        (TARGETS, None, 1, 30_000),
        (TARGETS, 100, 1_000, 30_000),  # a client cannot pass other tenants in the engine
        (TARGETS, 50_000, 30_001, 50_000),
        (None, 50_000, None, None),
    ],
)
async def test_a_tenants_deadline_only_relaxes_the_operators_target(
    start: Start,
    admission: AdmissionSettings | None,
    asked_ms: int | None,
    least_ms: int | None,
    most_ms: int | None,
) -> None:
    site = await start(router={"admission": admission}, wire={"pass_targets": True})
    site.set_tenants(TenantSpec("a"), a=KEY)
    headers = (bearer(),) if asked_ms is None else (bearer(), within(asked_ms))
    body, _ = await sent(site, *headers)
    if least_ms is None or most_ms is None:
        assert "vllm_xargs" not in body
        return
    left = body["vllm_xargs"]
    assert left["tpot_ms"] == 50
    assert least_ms <= left["deadline_ms"] <= most_ms


async def test_results_are_counted_and_shown_with_the_decision(start: Start) -> None:
    site = await start(router={"admission": TARGETS})
    site.fake.always(scripts.stream(3))
    for headers in ((), (within(50_000),)):
        client = await site.client()
        assert (await client.ask(chat("hi", *headers, stream=True))).status == 200
    counted = site.wire.metrics.targets._results
    assert counted["standard", "ttft", "met"] == counted["standard", "deadline", "met"] == 1
    later, earlier = site.wire.metrics.recent.newest(2)
    assert later.target_ttft_s == pytest.approx(50.0)
    assert earlier.target_ttft_s == 30.0

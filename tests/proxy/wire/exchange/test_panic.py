"""A running router before workers that one tenant's requests break."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from proxy.core.tenants.tenants import TenantSpec
from proxy.health.breaker_log import BreakerLog
from proxy.health.worker_state import why_not
from tests.proxy.wire import scripts
from tests.proxy.wire.client.test_tenants import KEY, OTHER, bearer, keep
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import chat, get
from tests.proxy.wire.site import Fake, Site

STEP_S = 0.05  # of the router's time, before requests that come together
BREAKS = "break it"


async def breaks_on_some(call: Call) -> None:
    """Close the connection on the requests that break workers, and answer all others."""
    await (scripts.hang_up if BREAKS.encode() in call.body else scripts.answer())(call)


async def attacked(start: Start, **router: float) -> Site:
    """Start four workers and a router with a healthy tenant and one that breaks them."""
    site = await start(*(Fake(f"w{i}") for i in range(4)), router=router)
    site.always(breaks_on_some)
    keep(site, TenantSpec("good"), TenantSpec("bad"), good=KEY, bad=OTHER)
    site.stand_still()
    return site


async def mixed(site: Site, turns: int) -> Counter[int]:
    """Send eight requests that break a worker, then four that do not; count the ends of those."""
    found: Counter[int] = Counter()
    for _ in range(turns):
        for key, text, times in ((OTHER, BREAKS, 8), (KEY, "hi", 4)):
            site.skip(STEP_S)
            asked = (site.ask(chat(text, bearer(key))) for _ in range(times))
            answers = await asyncio.gather(*asked)
            if key is KEY:
                found.update(answer.status for answer in answers)
    return found


async def test_a_bad_tenant_leaves_others_served(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    site = await attacked(start)
    site.fleet.roster.ejections.listener = BreakerLog()
    found = await mixed(site, 15)
    assert found[200] >= 0.9 * found.total()
    said = [each.getMessage() for each in caplog.records]
    assert any("(routing.panic_threshold)" in each for each in said)


async def test_with_breakers_that_are_always_heeded_it_does_not(start: Start) -> None:
    site = await attacked(start, panic_threshold=0.0)
    found = await mixed(site, 15)
    assert found[200] < 0.5 * found.total()


async def test_a_panic_shows_in_metrics_and_by_each_worker(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), Fake("w2"))
    site.stand_still()
    for name in ("w0", "w1"):
        for _ in range(3):
            site.fleet.health.failed(site.worker(name), site.clock(), why="502")
    page = (await site.ask(get("/metrics"))).body.decode()
    assert 'proxy_pool_panic{model="tiny",pool="serve"} 1' in page
    assert 'proxy_pool_panics_total{model="tiny",pool="serve"} 1' in page
    assert 'proxy_worker_breaker_open{worker="w0",role="general",model="tiny"} 0' in page
    assert 'worker="w0",role="general",model="tiny",state="open"} 1' in page
    why = "it returned 502; breaker ignored, because too many workers of its pool fail"
    assert why_not(site.worker("w0"), site.clock()) == why
    site.fleet.health.succeeded(site.worker("w0"))
    page = (await site.ask(get("/metrics"))).body.decode()
    assert 'proxy_pool_panic{model="tiny",pool="serve"} 0' in page
    assert 'proxy_worker_breaker_open{worker="w1",role="general",model="tiny"} 1' in page

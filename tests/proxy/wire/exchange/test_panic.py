"""Panic mode: a router before workers that one tenant's requests break."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from proxy.core.tenants.tenants import TenantSpec
from proxy.health.breaker_log import BreakerLog
from proxy.health.worker_state import why_not
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import KEY, OTHER_KEY, bearer, chat, get
from tests.proxy.wire.site import Fake, Site

STEP_S = 0.05  # of the router's clock, before each batch of requests
BREAKS = "break it"


async def break_on_marked(call: Call) -> None:
    """Close the connection on requests that contain `BREAKS`, and answer all others."""
    await (scripts.hang_up if BREAKS.encode() in call.body else scripts.answer())(call)


async def start_attacked(start: Start, **router: float) -> Site:
    """Start four workers and a router with a healthy tenant and a tenant that breaks workers."""
    # Without a queue retries do not pause: the clock stands.
    site = await start(*(Fake(f"w{i}") for i in range(4)), router=router | {"queue_requests": 0})
    site.always(break_on_marked)
    site.set_tenants(TenantSpec("good"), TenantSpec("bad"), good=KEY, bad=OTHER_KEY)
    site.stand_still()
    return site


async def send_mixed(site: Site, turns: int) -> Counter[int]:
    """Send eight breaking requests and four others per turn; count statuses of the others."""
    found: Counter[int] = Counter()
    for _ in range(turns):
        for key, text, times in ((OTHER_KEY, BREAKS, 8), (KEY, "hi", 4)):
            site.skip(STEP_S)
            requests = (site.ask(chat(text, bearer(key))) for _ in range(times))
            answers = await asyncio.gather(*requests)
            if key is KEY:
                found.update(answer.status for answer in answers)
    return found


async def test_panic_keeps_other_tenants_served(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    site = await start_attacked(start)
    site.fleet.roster.ejections.listener = BreakerLog()
    found = await send_mixed(site, 15)
    assert found[200] >= 0.9 * found.total()
    messages = [record.getMessage() for record in caplog.records]
    assert any("(routing.panic_threshold)" in message for message in messages)


async def test_panic_shows_in_metrics_and_worker_state(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), Fake("w2"))
    site.stand_still()
    for name in ("w0", "w1"):
        for _ in range(3):
            site.fleet.health.record_failure(site.worker(name), site.clock(), why="502")
    page = (await site.ask(get("/metrics"))).body.decode()
    assert 'proxy_pool_panic{model="tiny",pool="serve"} 1' in page
    assert 'proxy_pool_panics_total{model="tiny",pool="serve"} 1' in page
    assert 'proxy_worker_breaker_open{worker="w0",role="general",model="tiny"} 0' in page
    assert 'worker="w0",role="general",model="tiny",state="open"} 1' in page
    why = "it returned 502; breaker ignored, because too many workers of its pool fail"
    assert why_not(site.worker("w0"), site.clock()) == why
    site.fleet.health.record_success(site.worker("w0"))
    page = (await site.ask(get("/metrics"))).body.decode()
    assert 'proxy_pool_panic{model="tiny",pool="serve"} 0' in page
    assert 'proxy_worker_breaker_open{worker="w1",role="general",model="tiny"} 1' in page

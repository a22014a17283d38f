"""The intervals of the router's ticks."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from proxy.core.fleet.charges import Fleet
from proxy.core.router import Router, RouterSettings
from proxy.metrics.histogram import Histogram
from proxy.metrics.registry import Metrics
from proxy.wire.server import WireServer
from proxy.wire.settings import WireSettings
from proxy.wire.ticks import SHORT_TICK_S, SUSPENDED_LAG_S, SWEEP_INTERVAL_S, Ticks
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Client, get
from tests.proxy.wire.site import Site, eventually

HEAD = get("/health")


async def start_server() -> Any:
    router = Router(RouterSettings(), Fleet())
    wire = WireServer(router, WireSettings(), Metrics(router))
    await wire.start("127.0.0.1", 0)
    return wire


async def half_a_head(site: Site) -> Client:
    """Send half a head, stop the clock, and let the time limit for the head pass."""
    site.stand_still()
    client = await site.send(HEAD[:10])
    head_s = site.wire.settings.client_header_s
    await eventually(lambda: any(c.deadline == site.clock() + head_s for c in site.wire.clients))
    site.skip(head_s + 1.0)
    return client


def tick_late(wire: Any, lag_s: float) -> None:
    """Tick before the loop looks at any socket."""
    wire.ticks.timer.cancel()
    wire.ticks.due = time.monotonic() - lag_s
    wire.ticks.tick()


async def test_ticks_are_shorter_while_a_count_is_pending() -> None:
    wire = await start_server()
    idle = wire.ticks.timer.when()
    assert idle - asyncio.get_running_loop().time() < 0.5
    count = wire.make_tokenize_request(wire.clock(), print)
    assert wire.ticks.timer.when() - idle < SHORT_TICK_S - SWEEP_INTERVAL_S / 2
    wire.ticks.timer.cancel()
    wire.ticks.tick()
    busy = wire.ticks.timer.when()
    wire.short_waits.discard(count)
    wire.ticks.timer.cancel()
    wire.ticks.tick()
    assert wire.ticks.timer.when() - busy > SWEEP_INTERVAL_S / 2
    await wire.close()
    assert wire.ticks.timer is None


async def test_short_ticks_sweep_at_the_usual_interval() -> None:
    now, sweeps = 100.0, list[bool]()
    ticks = Ticks(lambda _, sweep: sweeps.append(sweep), lambda: True, lambda: now, Histogram(()))
    ticks.start()
    for _ in range(7):
        ticks.stop()
        ticks.tick()
        now += 0.4 * SWEEP_INTERVAL_S
    ticks.stop()
    assert sweeps == [True, False, False, True, False, False, True]


async def test_bytes_received_during_a_suspension_are_not_late(site: Site) -> None:
    """After a suspension, the loop sees the time before the data."""
    client = await half_a_head(site)
    os.write(client.writer.get_extra_info("socket").fileno(), HEAD[10:])
    tick_late(site.wire, SUSPENDED_LAG_S + 0.1)
    assert (await client.answer()).status == 200


async def test_slightly_late_tick_enforces_deadlines(start: Start) -> None:
    site = await start(wire={"linger_s": 0.1})
    client = await half_a_head(site)
    tick_late(site.wire, SUSPENDED_LAG_S / 2)
    rest = await client.closed()
    assert rest == b"" or rest.startswith(b"HTTP/1.1 408 ")


async def test_repeatedly_late_ticks_enforce_deadlines_every_second_time() -> None:
    wire = await start_server()
    expired: list[float] = []

    class Overdue:
        """A receiver whose deadline has passed."""

        deadline, expire = -1.0, staticmethod(expired.append)

    wire.releases.add(Overdue())
    counts = []
    for _ in range(4):
        wire.ticks.next_sweep = 0.0
        tick_late(wire, SUSPENDED_LAG_S + 1.0)
        counts.append(len(expired))
    assert counts == [0, 1, 1, 2]
    wire.releases.clear()
    await wire.close()


async def test_requests_that_come_to_the_queue_do_not_postpone_the_next_tick() -> None:
    wire = await start_server()
    wire.ticks.shorten()
    due = wire.ticks.due
    wire.ticks.shorten()
    assert wire.ticks.due == due
    await wire.close()

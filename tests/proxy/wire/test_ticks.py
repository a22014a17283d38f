"""How often the router looks at what waits."""

from __future__ import annotations

from typing import Any

from proxy.control.metrics import Metrics
from proxy.core.fleet import Fleet
from proxy.core.router import Router, RouterSettings
from proxy.wire.server import SWEEP_S, TICK_S, Wire
from proxy.wire.settings import WireSettings


async def test_it_looks_more_often_while_something_waits() -> None:
    router = Router(RouterSettings(), Fleet())
    wire: Any = Wire(router, WireSettings(), Metrics(router))
    await wire.start("127.0.0.1", 0)
    idle = wire._timer.when()
    question = wire.count(wire.clock(), print)
    assert wire._timer.when() - idle < TICK_S - SWEEP_S / 2
    wire._timer.cancel()
    wire._tick()
    busy = wire._timer.when()
    wire.counting.discard(question)
    wire._timer.cancel()
    wire._tick()
    assert wire._timer.when() - busy > SWEEP_S / 2
    await wire.close()

"""How often the router looks at what waits."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

from proxy.control.metrics import Metrics
from proxy.core.fleet import Fleet
from proxy.core.router import Router, RouterSettings
from proxy.wire.server import STOOD_STILL_S, SWEEP_S, TICK_S, Wire
from proxy.wire.settings import WireSettings
from tests.proxy.processes.crew import DEADLINE_S, Crew
from tests.proxy.wire.client import Client, get

HEAD, HEADER_S = get("/health"), 2.0
TIMEOUTS = f"{{client_header_s: {HEADER_S}}}"


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


class Hasty(Crew):
    """One process, that gives heads little time."""

    def write(self, *workers: str, routing: str = "{policy: least_loaded}") -> None:
        """Write the fleet file."""
        super().write(*workers, routing=routing)
        text = self.file.read_text().replace("probe:", f"timeouts: {TIMEOUTS}, probe:")
        self.file.write_text(text)


async def begun(crew: Crew) -> Client:
    """Have half a head come, and the router stopped well before it is late; again if need be."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            client, began = await Client.connect(crew.port), time.monotonic()
            await client.send(HEAD[:10])
            await asyncio.sleep(HEADER_S / 4)  # or its time would not have begun
            crew.tell(signal.SIGSTOP)
            if time.monotonic() - began < HEADER_S / 2:
                return client
            crew.tell(signal.SIGCONT)
            client.close()


async def test_who_sent_while_it_stood_still_was_not_late(tmp_path: Path) -> None:
    """Stopped as by a machine that is moved: its loop then sees the time before what was sent."""
    crew = Hasty(tmp_path, ["a"], 1)
    try:
        client = await begun(crew)
        await client.send(HEAD[10:])
        await asyncio.sleep(HEADER_S + STOOD_STILL_S)
        crew.tell(signal.SIGCONT)
        assert (await client.answer(within=DEADLINE_S)).status == 200
        client.close()
    finally:
        crew.tell(signal.SIGCONT)
        crew.close()


async def test_when_every_tick_is_late_deadlines_hold_in_every_second() -> None:
    router = Router(RouterSettings(), Fleet())
    wire: Any = Wire(router, WireSettings(), Metrics(router))
    await wire.start("127.0.0.1", 0)
    expired: list[float] = []

    class Late:
        """Somebody whose time is over."""

        deadline, expire = -1.0, staticmethod(expired.append)

    wire.releases.add(Late())
    found = []
    for _ in range(4):
        wire._timer.cancel()
        wire._next_sweep, wire._due = 0.0, time.monotonic() - STOOD_STILL_S - 1.0
        wire._tick()
        found.append(len(expired))
    assert found == [0, 1, 1, 2]
    wire.releases.clear()
    await wire.close()

"""The live view of a router of several processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp

from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import chat


class LiveView:
    """The state of a status page."""

    def __init__(self) -> None:
        self.fields: list[str] = []
        self.rows: dict[int, dict[str, object]] = {}
        self.ticked: set[int] = set()

    def take(self, line: bytes) -> bool:
        """Apply a line of the events; return whether it had data."""
        if not line.startswith(b"data: "):
            return False
        data = json.loads(line[6:])
        if "fields" in data:  # a full state
            self.fields, self.rows = data["fields"], {}
        for row in data["rows"]:
            self.rows[row[0]] = dict(zip(self.fields, row, strict=True))
        self.ticked |= {tick[0] for tick in data["ticks"]}
        return True

    @property
    def running(self) -> int:
        """The number of requests at workers."""
        return sum(row["ended"] is None and bool(row["worker"]) for row in self.rows.values())


async def test_live_view_shows_requests_of_all_processes(tmp_path: Path) -> None:
    group, fake, gate = RouterGroup(tmp_path, ["a"]), FakeWorker("a"), asyncio.Event()
    try:
        fake.port = group.ports["a"]
        await fake.listen()
        fake.always(scripts.stream(4, gap_s=0.02))
        await group.wait_until_up()
        clients = await group.connect_to_each()
        names = sorted(f"look-for-{number}" for number in range(len(clients)))
        view = LiveView()
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.get(f"{group.admin}/admin/live") as answer,
        ):
            asking: asyncio.Future[list[object]] | None = None
            async for line in answer.content:
                if view.take(line) and asking is None:  # all processes record from now on
                    pairs = zip(clients.values(), names, strict=True)
                    asking = asyncio.gather(
                        *(
                            client.ask(chat("hi", f"X-Request-Id: {name}".encode(), stream=True))
                            for client, name in pairs
                        )
                    )
                found = {row["id"]: row for row in view.rows.values() if row["ended"]}
                if set(names) <= set(found):
                    break
            assert asking is not None
            await asking
        numbers = {found[name]["n"] for name in names}
        assert len(numbers) == len(names) == 2
        assert numbers <= view.ticked
        assert {found[name]["worker"] for name in names} == {"a"}
        await group.admin_request("/logs", "PUT", json={"requests": True})
        for name, client in clients.items():
            named = b"X-Request-Id: logged-by-" + name
            assert (await client.ask(chat("hi", named))).status == 200
            await asyncio.to_thread(group.wait_for_line, f"REQUEST id=logged-by-{name.decode()}")
        # Requests of a killed process leave the page.
        fake.always(scripts.gated(gate, scripts.answer()))
        for client in clients.values():
            await client.send(chat())
        view, killed = LiveView(), False
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.get(f"{group.admin}/admin/live") as answer,
        ):
            async for line in answer.content:
                view.take(line)
                if not killed and view.running == 2:
                    killed = True
                    os.kill(group.pids[1 - group.leader], signal.SIGKILL)
                if killed and view.running == 1:
                    break
        assert view.running == 1
        gate.set()
        for client in clients.values():
            client.close()
    finally:
        await asyncio.to_thread(group.close)
        await fake.stop()

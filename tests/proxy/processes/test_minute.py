"""What is seen of a router of several processes: what all of them did."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp

from tests.proxy.processes.crew import DEADLINE_S, Crew
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import chat


class Told:
    """What a status page has been told."""

    def __init__(self) -> None:
        self.fields: list[str] = []
        self.rows: dict[int, dict[str, object]] = {}
        self.ticked: set[int] = set()

    def take(self, line: bytes) -> bool:
        """Take a line of the events; return whether it had any news."""
        if not line.startswith(b"data: "):
            return False
        told = json.loads(line[6:])
        if "fields" in told:  # everything anew
            self.fields, self.rows = told["fields"], {}
        for row in told["rows"]:
            self.rows[row[0]] = dict(zip(self.fields, row, strict=True))
        self.ticked |= {tick[0] for tick in told["ticks"]}
        return True

    @property
    def running(self) -> int:
        """The requests that are at workers."""
        return sum(row["ended"] is None and bool(row["worker"]) for row in self.rows.values())


async def test_the_page_shows_what_all_processes_do(tmp_path: Path) -> None:
    crew, fake, gate = Crew(tmp_path, ["a"]), FakeWorker("a"), asyncio.Event()
    try:
        fake.port = crew.ports["a"]
        await fake.listen()
        fake.always(scripts.stream(4, gap_s=0.02))
        await crew.up()
        clients = await crew.each()
        names = sorted(f"look-for-{number}" for number in range(len(clients)))
        told = Told()
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.get(f"{crew.admin}/admin/live") as answer,
        ):
            asking: asyncio.Future[list[object]] | None = None
            async for line in answer.content:
                if told.take(line) and asking is None:  # all note what passes from now on
                    pairs = zip(clients.values(), names, strict=True)
                    asking = asyncio.gather(
                        *(
                            client.ask(chat("hi", f"X-Request-Id: {name}".encode(), stream=True))
                            for client, name in pairs
                        )
                    )
                found = {row["id"]: row for row in told.rows.values() if row["ended"]}
                if set(names) <= set(found):
                    break
            assert asking is not None
            await asking
        numbers = {found[name]["n"] for name in names}
        assert len(numbers) == len(names) == 2
        assert numbers <= told.ticked
        assert {found[name]["worker"] for name in names} == {"a"}
        await crew.ask_admin("/logs", "PUT", json={"requests": True})
        for name, client in clients.items():
            named = b"X-Request-Id: logged-by-" + name
            assert (await client.ask(chat("hi", named))).status == 200
            await asyncio.to_thread(crew.says, f"REQUEST id=logged-by-{name.decode()}")
        # What a process that is killed had under way leaves the page.
        fake.always(scripts.gated(gate, scripts.answer()))
        for client in clients.values():
            await client.send(chat())
        told, killed = Told(), False
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.get(f"{crew.admin}/admin/live") as answer,
        ):
            async for line in answer.content:
                told.take(line)
                if not killed and told.running == 2:
                    killed = True
                    os.kill(crew.pids[1 - crew.leader], signal.SIGKILL)
                if killed and told.running == 1:
                    break
        assert told.running == 1
        gate.set()
        for client in clients.values():
            client.close()
    finally:
        await asyncio.to_thread(crew.close)
        await fake.stop()

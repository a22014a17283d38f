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
from tests.proxy.wire.client import chat
from tests.proxy.wire.fake_worker import FakeWorker


async def test_the_page_shows_what_all_processes_did(tmp_path: Path) -> None:
    crew, fake = Crew(tmp_path, ["a"]), FakeWorker("a")
    try:
        fake.port = crew.ports["a"]
        await fake.listen()
        fake.always(scripts.stream(4, gap_s=0.02))
        await crew.up()
        clients = await crew.each()
        ids = {f"look-for-{number}" for number in range(len(clients))}
        seen: dict[str, dict[str, object]] = {}
        ticked: set[int] = set()
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.get(f"{crew.admin}/admin/live") as answer,
        ):
            fields: list[str] = []
            asking: asyncio.Future[list[object]] | None = None
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                told = json.loads(line[6:])
                fields = told.get("fields", fields)
                for row in told["rows"]:
                    named = dict(zip(fields, row, strict=True))
                    seen[str(named["id"])] = named
                ticked |= {tick[0] for tick in told["ticks"]}
                if asking is None:  # all note what passes, now that somebody was told
                    pairs = zip(clients.values(), sorted(ids), strict=True)
                    asking = asyncio.gather(
                        *(
                            client.ask(chat("hi", f"X-Request-Id: {name}".encode(), stream=True))
                            for client, name in pairs
                        )
                    )
                if ids <= set(seen) and all(seen[name]["ended"] for name in ids):
                    break
            assert asking is not None
            await asking
        numbers = {seen[name]["n"] for name in ids}
        assert len(numbers) == len(ids) == 2
        assert numbers <= ticked
        assert {seen[name]["worker"] for name in ids} == {"a"}
        await crew.ask_admin("/logs", "PUT", json={"requests": True})
        for name, client in clients.items():
            named = b"X-Request-Id: logged-by-" + name
            assert (await client.ask(chat("hi", named))).status == 200
            await asyncio.to_thread(crew.says, f"REQUEST id=logged-by-{name.decode()}")
            client.close()
    finally:
        await asyncio.to_thread(crew.close)
        await fake.stop()


async def test_what_a_process_that_is_killed_had_under_way_leaves_the_page(tmp_path: Path) -> None:
    crew, fake, gate = Crew(tmp_path, ["a"]), FakeWorker("a"), asyncio.Event()
    try:
        fake.port = crew.ports["a"]
        await fake.listen()
        fake.always(scripts.answer())
        await crew.up()
        clients = await crew.each()
        fake.always(scripts.gated(gate, scripts.answer()))
        for client in clients.values():
            await client.send(chat())
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.get(f"{crew.admin}/admin/live") as answer,
        ):
            fields: list[str] = []
            rows: dict[int, dict[str, object]] = {}
            killed = False
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                told = json.loads(line[6:])
                if "fields" in told:  # everything anew
                    fields, rows = told["fields"], {}
                for row in told["rows"]:
                    rows[row[0]] = dict(zip(fields, row, strict=True))
                running = sum(row["ended"] is None and bool(row["worker"]) for row in rows.values())
                if not killed and running == 2:
                    killed = True
                    os.kill(crew.pids[1 - crew.leader], signal.SIGKILL)
                if killed and running == 1:
                    break
            assert running == 1
        gate.set()
        for client in clients.values():
            client.close()
    finally:
        await asyncio.to_thread(crew.close)
        await fake.stop()

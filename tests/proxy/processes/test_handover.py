"""Hand-overs of a router of several processes: what one does, all know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.proxy.processes.crew import DEADLINE_S, Crew
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.pairs import chat_body, expected, words
from tests.proxy.wire.raw_client import request

ROLES = {"p": "prefill", "d": "decode"}


class Sides(Crew):
    """A router before a prefill and a decode worker, by which all is handed over."""

    def write(self, *workers: str, routing: str = "{disaggregate_above: 1}") -> None:
        """Write the fleet file."""
        lines = "".join(
            f"  - {{name: {name}, role: {ROLES[name]}, "
            f"url: 'http://127.0.0.1:{self.ports[name]}'}}\n"
            for name in workers
        )
        self.file.write_text(
            f"model: tiny\nworkers:\n{lines}transfer: nixl\nrouting: {routing}\n"
            f"router: {{port: 0, admin: {{port: 0}}, processes: {self.count}, drain_s: 5.0, "
            "probe: {interval_s: 0.05}}\n"
        )


@pytest.fixture
async def sides(tmp_path: Path) -> AsyncIterator[tuple[Sides, dict[str, FakeWorker], Kv]]:
    """Start it, and wait until the two are connected."""
    crew, kv = await asyncio.to_thread(Sides, tmp_path, [*ROLES]), Kv()
    fakes = {name: FakeWorker(name) for name in ROLES}
    try:
        for name, fake in fakes.items():
            fake.port = crew.ports[name]
            fake.always(kv.worker(fake, ROLES[name]))
            await fake.listen()
        await asyncio.to_thread(crew.says, "transfers from p to d: ready")
        yield crew, fakes, kv
    finally:
        await asyncio.to_thread(crew.close)
        for fake in fakes.values():
            await fake.stop()
    assert kv.faults == []
    assert kv.held == []


async def test_all_hand_over_and_know_held_blocks(
    sides: tuple[Sides, dict[str, FakeWorker], Kv],
) -> None:
    crew, fakes, kv = sides
    clients = (await crew.each()).values()
    for client in clients:  # each is told of the connection soon after it is made
        async with asyncio.timeout(DEADLINE_S):
            while True:
                body = chat_body()
                answer = await client.ask(request(body, b"X-Explain: 1"))
                assert words(answer) == expected(body)
                if b"prefill=p" in answer.one(b"x-route"):
                    break
    rest = asyncio.Event()
    usual = fakes["d"].script_for

    async def slowly(call: Call) -> None:
        await rest.wait()
        await usual(call)(call)

    fakes["d"].then(slowly, slowly)
    bodies = [chat_body() for _ in clients]
    for client, body in zip(clients, bodies, strict=True):
        await client.send(request(body))
    await crew.until(lambda found: found["p"]["held"] == len(bodies))
    await crew.ask_admin("/workers/p/drain", "POST")
    await crew.until(lambda found: found["p"]["state"] == "draining")
    rest.set()
    for client, body in zip(clients, bodies, strict=True):
        assert words(await client.answer()) == expected(body)
    await crew.until(lambda found: found["p"]["held"] == 0 and found["p"]["state"] == "drained")
    for client in clients:
        client.close()
    assert {each.end for each in kv.pinned} == {"read"}

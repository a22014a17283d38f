"""Hand-overs of a router of several processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, leave
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.pairs import chat_body, expected, words
from tests.proxy.wire.raw_client import request

ROLES = {"p": "prefill", "d": "decode"}


class HandoverGroup(RouterGroup):
    """A router before a prefill worker and a decode worker."""

    def write(self, *workers: str, routing: str = "{disaggregate_above: 1}") -> None:
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
async def handover_group(
    tmp_path: Path,
) -> AsyncIterator[tuple[HandoverGroup, dict[str, FakeWorker], Kv]]:
    """Start the router; wait until the link is ready."""
    group, kv = await asyncio.to_thread(HandoverGroup, tmp_path, [*ROLES]), Kv()
    fakes = await group.start_workers()
    for name, fake in fakes.items():
        fake.always(kv.worker(fake, ROLES[name]))
    try:
        await asyncio.to_thread(group.wait_for_line, "transfers from p to d: ready")
        yield group, fakes, kv
    finally:
        await asyncio.to_thread(group.close)
        await leave(fakes, group)
    assert kv.faults == []
    assert kv.held == []


async def test_all_processes_hand_over_and_know_held_blocks(
    handover_group: tuple[HandoverGroup, dict[str, FakeWorker], Kv],
) -> None:
    group, fakes, kv = handover_group
    clients = await group.one_of_each()
    for client in clients:  # the processes learn of the link one after the other
        async with asyncio.timeout(DEADLINE_S):
            while True:
                body = chat_body()
                answer = await client.ask(request(body, b"X-Explain: 1"))
                assert words(answer) == expected(body)
                if b"prefill=p" in answer.one(b"x-route"):
                    break
    rest = asyncio.Event()
    usual = fakes["d"].script_for

    async def decode_later(call: Call) -> None:
        await rest.wait()
        await usual(call)(call)

    fakes["d"].then(decode_later, decode_later)
    bodies = [chat_body() for _ in clients]
    for client, body in zip(clients, bodies, strict=True):
        await client.send(request(body))
    await group.wait_until(lambda found: found["p"]["held"] == len(bodies))
    await group.admin_request("/workers/p/drain", "POST")
    await group.wait_until(lambda found: found["p"]["state"] == "draining")
    rest.set()
    for client, body in zip(clients, bodies, strict=True):
        assert words(await client.answer()) == expected(body)
    await group.wait_until(
        lambda found: found["p"]["held"] == 0 and found["p"]["state"] == "drained"
    )
    assert {blocks.end for blocks in kv.pinned} == {"read"}

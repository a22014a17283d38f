"""Hand-overs of a router of several processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, serving
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.pairs import chat_body, expected, words
from tests.proxy.wire.raw_client import request

ROLES = {"p": "prefill", "d": "decode"}


async def test_all_processes_hand_over_and_know_held_blocks(tmp_path: Path) -> None:
    kv = Kv()
    async with serving(
        tmp_path,
        [*ROLES],
        fields={name: f"role: {role}" for name, role in ROLES.items()},
        routing="{disaggregate_above: 1}",
        more="transfer: nixl\n",
    ) as (group, fakes):
        for name, fake in fakes.items():
            fake.always(kv.worker(fake, ROLES[name]))
        await asyncio.to_thread(group.wait_for_line, "transfers from p to d: ready")
        await _hand_over(group, fakes, kv)
    assert kv.faults == []
    assert kv.held == []


async def _hand_over(group: RouterGroup, fakes: dict[str, FakeWorker], kv: Kv) -> None:
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

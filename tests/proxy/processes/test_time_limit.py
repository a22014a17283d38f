"""Time limits in each process of a router."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, serving
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import BrokenError, Client, chat


async def check_limits(group: RouterGroup, name: bytes, client: Client) -> None:
    """Exceed the limit of a request and that of a body in one process."""
    data = chat("hi", b"X-Request-Id: ended-in-" + name)
    while True:
        try:
            answer = await client.ask(data, within=DEADLINE_S)
            break
        except (BrokenError, ConnectionError):  # the connection was idle for too long
            client = (await group.connect_to_each())[name]
    assert (answer.status, answer.error()["code"]) == (504, "time_limit")
    await client.send(chat()[:-1])
    assert (await client.answer(within=DEADLINE_S)).error()["code"] == "slow_body"
    line = await asyncio.to_thread(group.wait_for_line, f"REQUEST id=ended-in-{name.decode()}")
    assert "reason=time_limit" in line
    assert "status=504" in line


async def test_limits_hold_in_both_processes(tmp_path: Path) -> None:
    limits = ", timeouts: {request_s: 3, client_idle_s: 1}"
    async with serving(tmp_path, ["a"], router=limits) as (group, fakes):
        await group.wait_until_up()
        fakes["a"].always(scripts.stall)
        await group.admin_request("/logs", "PUT", json={"requests": True})
        clients = await group.connect_to_each()
        assert len(clients) == 2
        await asyncio.gather(*(check_limits(group, *pair) for pair in clients.items()))
        await group.wait_until(lambda workers: workers["a"]["requests"] == 0)

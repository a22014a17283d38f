"""Time limits in each process of a router."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import BrokenError, Client, chat


class LimitedGroup(RouterGroup):
    """A router with short timeouts."""

    def write(self, *workers: str, routing: str = "{policy: least_loaded}") -> None:
        """Write the fleet file."""
        super().write(*workers, routing=routing)
        text = self.file.read_text()
        limits = "router: {timeouts: {request_s: 3, client_idle_s: 1}, "
        self.file.write_text(text.replace("router: {", limits))


async def check_limits(group: RouterGroup, name: bytes, client: Client) -> None:
    """Exceed the limit of a request and that of a body in one process."""
    data = chat("hi", b"X-Request-Id: ended-in-" + name)
    while True:
        try:
            answer = await client.ask(data, within=DEADLINE_S)
            break
        except (BrokenError, ConnectionError):  # the connection was idle for too long
            client.close()
            client = (await group.connect_to_each())[name]
    assert (answer.status, answer.error()["code"]) == (504, "time_limit")
    await client.send(chat()[:-1])
    assert (await client.answer(within=DEADLINE_S)).error()["code"] == "slow_body"
    client.close()
    line = await asyncio.to_thread(group.wait_for_line, f"REQUEST id=ended-in-{name.decode()}")
    assert "reason=time_limit" in line
    assert "status=504" in line


async def test_limits_hold_in_both_processes(tmp_path: Path) -> None:
    group, fake = LimitedGroup(tmp_path, ["a"]), FakeWorker("a")
    try:
        fake.port = group.ports["a"]
        await fake.listen()
        await group.wait_until_up()
        fake.always(scripts.stall)
        await group.admin_request("/logs", "PUT", json={"requests": True})
        clients = await group.connect_to_each()
        assert len(clients) == 2
        await asyncio.gather(*(check_limits(group, *pair) for pair in clients.items()))
        await group.wait_until(lambda workers: workers["a"]["requests"] == 0)
    finally:
        await asyncio.to_thread(group.close)
        await fake.stop()

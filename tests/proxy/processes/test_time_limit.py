"""Each process of a router ends what takes too long, with a line in the log that says why."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.proxy.processes.crew import DEADLINE_S, Crew
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import BrokenError, Client, chat


class HurriedCrew(Crew):
    """Has little time for a request."""

    def write(self, *workers: str, routing: str = "{policy: least_loaded}") -> None:
        """Write the fleet file."""
        super().write(*workers, routing=routing)
        text = self.file.read_text()
        limits = "router: {timeouts: {request_s: 3, client_idle_s: 1}, "
        self.file.write_text(text.replace("router: {", limits))


async def ended(crew: Crew, name: bytes, client: Client) -> None:
    """Wait for an answer, and send no end of a body, to one of the processes."""
    asked = chat("hi", b"X-Request-Id: ended-in-" + name)
    while True:
        try:
            answer = await client.ask(asked, within=DEADLINE_S)
            break
        except (BrokenError, ConnectionError):  # it was idle for too long by then
            client.close()
            client = (await crew.each())[name]
    assert (answer.status, answer.error()["code"]) == (504, "time_limit")
    await client.send(chat()[:-1])
    assert (await client.answer(within=DEADLINE_S)).error()["code"] == "slow_body"
    client.close()
    line = await asyncio.to_thread(crew.says, f"REQUEST id=ended-in-{name.decode()}")
    assert "reason=time_limit" in line
    assert "status=504" in line


async def test_both_processes_keep_both_limits(tmp_path: Path) -> None:
    crew, fake = HurriedCrew(tmp_path, ["a"]), FakeWorker("a")
    try:
        fake.port = crew.ports["a"]
        await fake.listen()
        await crew.up()
        fake.always(scripts.stall)
        await crew.ask_admin("/logs", "PUT", json={"requests": True})
        clients = await crew.each()
        assert len(clients) == 2
        await asyncio.gather(*(ended(crew, *each) for each in clients.items()))
        await crew.until(lambda workers: workers["a"]["requests"] == 0)
    finally:
        await asyncio.to_thread(crew.close)
        await fake.stop()

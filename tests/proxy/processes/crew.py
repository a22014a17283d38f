"""A router of several processes, started as its users do, before fake workers on known ports."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.proxy.wire.raw_client import Client, chat, get
from vllm_sched.workers.launch import free_port

DEADLINE_S = 60.0
POLL_S = 0.02
PROC = Path("/proc")


class Crew:
    """The router, told of by what it says and does."""

    def __init__(
        self,
        folder: Path,
        workers: Sequence[str],
        count: int = 2,
        *,
        listens: tuple[int, int] = (0, 0),
        drain_s: float = 5.0,
        notice_s: float = 0.0,
        more: str = "",
    ) -> None:
        self.ports = {name: free_port() for name in workers}
        self.file = folder / "fleet.yaml"
        self.count = count
        self.listens = listens  # clients' port and operators', as asked for
        self.drain_s, self.notice_s = drain_s, notice_s
        self.more = more  # of the fleet file
        self.write(*workers)
        self.said: list[str] = []
        self.spoke = threading.Condition()
        command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(self.file)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        try:
            line = self.says("/v1")
        except BaseException:
            self.close()
            raise
        self.port = int(line.split("/v1")[0].rsplit(":", 1)[1])
        self.admin = line.split("admin ")[1].split()[0]

    def write(self, *workers: str, routing: str = "{policy: least_loaded}") -> None:
        """Write the fleet file for some of the workers."""
        lines = "".join(
            f"  - {{name: {name}, url: 'http://127.0.0.1:{self.ports[name]}', max_requests: 4}}\n"
            for name in workers
        )
        port, admin = self.listens
        self.file.write_text(
            f"model: tiny\nworkers:\n{lines}routing: {routing}\n"
            f"router: {{port: {port}, admin: {{port: {admin}}}, processes: {self.count}, "
            f"drain_s: {self.drain_s}, drain_notice_s: {self.notice_s}, "
            f"probe: {{interval_s: 0.05}}}}\n{self.more}"
        )

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.spoke:
                self.said.append(line)
                self.spoke.notify_all()
        with self.spoke:
            self.spoke.notify_all()

    def says(self, text: str, times: int = 1) -> str:
        """Wait until it has said something so often; return the last such line."""

        def lines() -> list[str]:
            return [line for line in self.said if text in line]

        with self.spoke:
            said = self.spoke.wait_for(
                lambda: len(lines()) >= times or not self.reader.is_alive(), DEADLINE_S
            )
        assert said, f"it never said {text!r}:\n{''.join(self.said)}"
        assert lines(), f"it ended:\n{''.join(self.said)}"
        return lines()[-1]

    @property
    def pids(self) -> dict[int, int]:
        """Its processes that serve, by their index."""
        found = {}
        for thread in PROC.glob(f"{self.process.pid}/task/*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                for pid in (thread / "children").read_text().split():
                    words = (PROC / pid / "cmdline").read_text().split("\0")
                    if "proxy.processes" in words:
                        found[int(words[words.index("proxy.processes") + 1])] = int(pid)
        return found

    @property
    def leader(self) -> int:
        """Who leads."""
        return int(self.says(" leads").split(" leads")[0].rsplit(" ", 1)[1])

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Leave nothing of it."""
        pids = list(self.pids.values())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in pids:  # they end by themselves, but not at once
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.reader.join(DEADLINE_S)
        if self.process.stderr is not None:
            self.process.stderr.close()

    # As clients and operators see it

    async def each(self) -> dict[bytes, Client]:
        """Connect to every one of its processes; they put different marks on requests."""
        found: dict[bytes, Client] = {}
        give_up = time.monotonic() + DEADLINE_S
        while len(found) < self.count:
            assert time.monotonic() < give_up, found
            client = await Client.connect(self.port)
            mark = await mark_of(client)
            if found.setdefault(mark, client) is not client:
                client.close()
                await asyncio.sleep(POLL_S)
        return found

    async def ask_admin(self, path: str, method: str = "GET", **more: Any) -> Any:
        """Ask the admin API."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.admin}/admin{path}", **more) as answer,
        ):
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return what the admin API says of each worker."""
        return {worker["name"]: worker for worker in await self.ask_admin("/workers")}

    async def until(self, so: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        """Wait until the workers are so."""
        give_up = time.monotonic() + DEADLINE_S
        while not so(found := await self.workers()):
            assert time.monotonic() < give_up, found
            await asyncio.sleep(POLL_S)

    async def up(self) -> None:
        """Wait until every process uses every worker."""
        await self.until(lambda all_: all(worker["state"] == "up" for worker in all_.values()))
        names = set(await self.workers())
        for client in (await self.each()).values():
            used: set[str] = set()
            give_up = time.monotonic() + DEADLINE_S
            while used != names:
                assert time.monotonic() < give_up, used
                used |= {await worker_of(client)} - {""}
                await asyncio.sleep(POLL_S)
            client.close()


async def worker_of(client: Client) -> str:
    """Ask, and return the name of the worker that answered; empty if there was none."""
    answer = await client.ask(chat("hi", b"X-Explain: 1"))
    [route] = [value for key, value in answer.headers if key == b"x-route"]
    return route.split(b";")[0].decode() if answer.status == 200 else ""


async def mark_of(client: Client) -> bytes:
    """Return what the process at the other end puts on requests."""
    answer = await client.ask(get("/health"))
    [name] = [value for key, value in answer.headers if key == b"x-request-id"]
    return name.rpartition(b"-")[0]


async def samples(client: Client) -> dict[str, float]:
    """Return a page of metrics."""
    answer = await client.ask(get("/metrics"))
    assert answer.status == 200
    lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def total(found: dict[str, float], name: str) -> float:
    """Add up all series of a metric."""
    return sum(value for series, value in found.items() if series.partition("{")[0] == name)

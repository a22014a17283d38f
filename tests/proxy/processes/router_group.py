"""A router of several real processes before fake workers on known ports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat, get, request
from vllm_sched.workers.launch import free_port

DEADLINE_S = 240.0  # a router takes a minute to start on a machine with 20 busy processes
POLL_S = 0.05  # seldom enough to leave the CPU to the routers
PROC = Path("/proc")


class RouterGroup:
    """The router, observed by its log lines, ports and processes."""

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
        router: str = "",
        admin: str = "",
        routing: str = "{policy: least_loaded}",
        ports: dict[str, int] | None = None,
        fields: dict[str, str] | None = None,
    ) -> None:
        self.ports = ports or {name: free_port() for name in workers}
        self.file = folder / "fleet.yaml"
        self.count = count
        self.listens = listens  # configured ports of clients and of the admin API
        self.drain_s, self.notice_s = drain_s, notice_s
        self.more = more  # appended to the fleet file
        self.router, self.admin_fields = router, admin  # more of its blocks `router` and `admin`
        self.routing = routing
        self.fields = fields or {}  # of workers, by name
        self.write(*workers)
        self.clients: list[Client] = []
        self.lines: list[str] = []
        self.line_added = threading.Condition()
        command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(self.file)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        try:
            line = self.wait_for_line("/v1")
        except BaseException:
            self.close()
            raise
        self.port = int(line.split("/v1")[0].rsplit(":", 1)[1])
        self.admin = line.split("admin ")[1].split()[0]

    def write(self, *workers: str, routing: str = "") -> None:
        """Write the fleet file for some of the workers."""
        lines = "".join(
            f"  - {{name: {name}, url: 'http://127.0.0.1:{self.ports[name]}', "
            f"{self.fields.get(name, 'max_requests: 4')}}}\n"
            for name in workers
        )
        port, admin = self.listens
        self.file.write_text(
            f"model: tiny\nworkers:\n{lines}routing: {routing or self.routing}\n"
            f"router: {{port: {port}, admin: {{port: {admin}{self.admin_fields}}}, "
            f"processes: {self.count}, drain_s: {self.drain_s}, drain_notice_s: {self.notice_s}, "
            f"probe: {{interval_s: 0.1}}{self.router}}}\n{self.more}"
        )

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.line_added:
                self.lines.append(line)
                self.line_added.notify_all()
        with self.line_added:
            self.line_added.notify_all()

    def wait_for_line(self, text: str, times: int = 1) -> str:
        """Wait for the n-th log line with a text; return it."""

        def lines() -> list[str]:
            return [line for line in self.lines if text in line]

        with self.line_added:
            found = self.line_added.wait_for(
                lambda: len(lines()) >= times or not self.reader.is_alive(), DEADLINE_S
            )
        assert found, f"no line with {text!r}:\n{''.join(self.lines)}"
        assert lines(), f"the router ended:\n{''.join(self.lines)}"
        return lines()[-1]

    @property
    def pids(self) -> dict[int, int]:
        """The serving processes by index."""
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
        return int(self.wait_for_line(" leads").split(" leads")[0].rsplit(" ", 1)[1])

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        pids = list(self.pids.values())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in pids:  # they end without a signal, but later
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.reader.join(DEADLINE_S)
        if self.process.stderr is not None:
            self.process.stderr.close()

    # Workers, clients and operators

    async def start_workers(self) -> dict[str, FakeWorker]:
        fakes = {name: FakeWorker(name) for name in self.ports}
        for name, fake in fakes.items():
            fake.port = self.ports[name]
            await fake.listen()
        return fakes

    async def connect(self) -> Client:
        """Return a new client, which `leave` closes."""
        self.clients.append(await Client.connect(self.port))
        return self.clients[-1]

    async def connect_to_each(self) -> dict[bytes, Client]:
        """Return a client for every process, by the prefix of its request IDs."""
        found: dict[bytes, Client] = {}

        async def has_all() -> bool:
            client = await self.connect()
            if found.setdefault(await id_prefix_of(client), client) is not client:
                client.close()
            return len(found) == self.count

        await until(has_all)
        return found

    async def one_of_each(self) -> list[Client]:
        return [*(await self.connect_to_each()).values()]

    async def admin_request(self, path: str, method: str = "GET", **more: Any) -> Any:
        """Send a request to the admin API; return its JSON."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.admin}/admin{path}", **more) as answer,
        ):
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["name"]: worker for worker in await self.admin_request("/workers")}

    async def wait_until(self, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not condition(found := await self.workers()):
            assert time.monotonic() < give_up, found
            await asyncio.sleep(POLL_S)

    async def wait_for_requests(self, count: int) -> None:
        await self.wait_until(
            lambda workers: sum(worker["requests"] for worker in workers.values()) == count
        )

    async def wait_until_up(self) -> None:
        """Wait until every process uses every worker."""
        await self.wait_until(
            lambda workers: all(worker["state"] == "up" for worker in workers.values())
        )
        names = set(await self.workers())
        for client in await self.one_of_each():
            used: set[str] = set()
            give_up = time.monotonic() + DEADLINE_S
            while used != names:
                assert time.monotonic() < give_up, used
                used |= {await worker_of(client)} - {""}
                await asyncio.sleep(POLL_S)
            client.close()


@asynccontextmanager
async def serving(
    folder: Path, workers: Sequence[str], **settings: Any
) -> AsyncIterator[tuple[RouterGroup, dict[str, FakeWorker]]]:
    """Run a router and its workers within the block."""
    group = await asyncio.to_thread(RouterGroup, folder, workers, **settings)
    fakes = await group.start_workers()
    try:
        yield group, fakes
    finally:
        await asyncio.to_thread(group.close)
        await leave(fakes, group)


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait until a condition holds that only requests show."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def leave(fakes: dict[str, FakeWorker], *groups: RouterGroup) -> None:
    """Close all clients of these groups, and stop the workers."""
    for group in groups:
        while group.clients:
            group.clients.pop().close()
    for fake in fakes.values():
        await fake.stop()


def hold(fakes: dict[str, FakeWorker]) -> asyncio.Event:
    """Let workers answer once the returned event is set."""
    opening = asyncio.Event()
    for fake in fakes.values():
        fake.always(scripts.gated(opening, scripts.answer()))
    return opening


async def worker_of(client: Client) -> str:
    """Send a request; return the name of its worker, or an empty text if there was none."""
    answer = await client.ask(chat("hi", b"X-Explain: 1"))
    return answer.one(b"x-route").split(b";")[0].decode() if answer.status == 200 else ""


async def id_prefix_of(client: Client) -> bytes:
    answer = await client.ask(get("/health"))
    return answer.one(b"x-request-id").rpartition(b"-")[0]


def stored_response(name: str) -> scripts.Script:
    """Return a worker's script that answers with a response of this ID."""
    body = {"id": name, "object": "response", "status": "completed"}
    return scripts.answer(200, json.dumps(body).encode())


async def worker_of_response(
    client: Client, fakes: dict[str, FakeWorker], *headers: bytes, **fields: str
) -> str:
    """Send a request to the Responses API; return the name of its worker."""
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 5, **fields}
    data = request(json.dumps(body).encode(), *headers, path="/v1/responses")
    return await worker_that_serves(client, fakes, data)


async def worker_that_serves(client: Client, fakes: dict[str, FakeWorker], data: bytes) -> str:
    counts = {name: len(fake.served) for name, fake in fakes.items()}
    assert (await client.ask(data)).status == 200
    [worker] = [name for name, fake in fakes.items() if len(fake.served) > counts[name]]
    return worker


async def samples(client: Client) -> dict[str, float]:
    answer = await client.ask(get("/metrics"))
    assert answer.status == 200
    lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for series, value in found.items() if series.partition("{")[0] == name)

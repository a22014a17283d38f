"""The router under test, and what it has in flight."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import ssl
import sys
import time
from contextlib import suppress
from pathlib import Path

import aiohttp

READY_TIMEOUT_S, DRAIN_TIMEOUT_S = 60.0, 60.0
GROWTH_S = 30.0  # until the memory of a new process is representative
STALL_S = (1.0, 8.0)  # the router kills a process that stalls for 30 s
# Metrics that are zero in an idle router.
IN_FLIGHT_METRICS = (
    "proxy_worker_inflight_requests{",
    "proxy_queue_requests ",
    "proxy_queue_bytes ",
    "proxy_client_connections ",
    "proxy_tenant_inflight_requests{",
)


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


async def in_flight(port: int, tls: ssl.SSLContext | None = None) -> float:
    """Return the sum of the in-flight metrics of a router."""
    total = 0.0
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url_of(port, tls)}/metrics", ssl=tls or True) as answer,
    ):
        for line in (await answer.text()).splitlines():
            if line.startswith(IN_FLIGHT_METRICS) and not line.startswith("#"):
                total += float(line.rsplit(" ", 1)[1])
    return total - 1  # without this connection


def url_of(port: int, tls: ssl.SSLContext | None) -> str:
    return f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"


async def wait_idle(port: int, tls: ssl.SSLContext | None = None) -> float:
    """Wait until nothing is in flight; return what is still in flight after the timeout."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while True:
        load = await in_flight(port, tls)
        if load <= 0 or time.monotonic() > deadline:
            return load
        await asyncio.sleep(0.2)


class Router:
    """The process under test."""

    def __init__(
        self, fleet: Path, port: int, env: dict[str, str], tls: ssl.SSLContext | None
    ) -> None:
        self.fleet, self.port, self.env, self.tls = fleet, port, env, tls
        self.process: asyncio.subprocess.Process | None = None
        self.kills = self.member_kills = self.stalls = 0
        self.growing_until = 0.0
        self.recovered_s: list[float] = []

    async def start(self) -> None:
        """Start the router and wait until it is ready."""
        with (self.fleet.parent / "router.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "vllm_sched.cli.main", "router", str(self.fleet),
                stdout=log, stderr=log, env=self.env,
            )  # fmt: skip
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await self.is_ready():
            if time.monotonic() > deadline or self.process.returncode is not None:
                raise RuntimeError((self.fleet.parent / "router.log").read_text()[-2000:])
            await asyncio.sleep(0.05)

    async def is_ready(self) -> bool:
        with suppress(aiohttp.ClientError):
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{url_of(self.port, self.tls)}/ready", ssl=self.tls or True) as answer,
            ):
                return answer.status == 200
        return False

    async def restart(self) -> None:
        """Kill the router, start another and record how long that took."""
        assert self.process is not None
        started = time.monotonic()
        self.process.kill()
        await self.process.wait()
        await self.start()
        self.kills += 1
        self.recovered_s.append(time.monotonic() - started)

    def kill_member(self, rng: random.Random) -> None:
        assert self.process is not None
        if children := children_of(self.process.pid):
            self.member_kills += 1
            os.kill(rng.choice(children), signal.SIGKILL)
            self.growing_until = time.monotonic() + GROWTH_S

    async def stall_member(self, rng: random.Random) -> None:
        """Stop one of the router's processes, and continue it after STALL_S."""
        assert self.process is not None
        pid = rng.choice(children_of(self.process.pid) or [self.process.pid])
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.stalls += 1
        try:
            await asyncio.sleep(rng.uniform(*STALL_S))
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def stop(self) -> int:
        """Terminate the router and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), READY_TIMEOUT_S)

    def usage(self) -> tuple[float, int]:
        """Return the resident MiB and the open files of all the router's processes."""
        assert self.process is not None
        kib = files = 0
        for pid in (self.process.pid, *children_of(self.process.pid)):
            folder = Path(f"/proc/{pid}")
            with suppress(OSError):
                status = (folder / "status").read_text()
                kib += int(status.partition("VmRSS:")[2].split()[0])
                files += len(list((folder / "fd").iterdir()))
        return kib / 1024, files

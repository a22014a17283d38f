"""A router on a free port before fake workers, and the check for leftovers."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import psutil

from proxy.config import TransferConfig, WorkerTlsConfig
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.tenants import Tenant, TenantSpec
from proxy.metrics.registry import Metrics
from proxy.transfer.registry import connector
from proxy.wire.server import WireServer
from proxy.wire.settings import WireSettings
from tests.present import present
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.raw_client import DEADLINE_S, Answer, Client

# Connections usually end at once, and the list of the machine's connections takes long to read.
FOREIGN_AFTER_S = 0.5


@dataclass
class Fake:
    """A worker to start."""

    name: str = "w0"
    role: Role = Role.GENERAL
    model: str = "tiny"
    max_model_len: int = 16384
    max_requests: int | None = None
    api_key: str | None = None
    up: bool = True
    tls: ssl.SSLContext | None = None  # of the worker's port
    worker_tls: WorkerTlsConfig | None = None  # the router's settings for the worker


class Site:
    """A router, its workers and its clients."""

    def __init__(self, router: dict[str, Any], wire: dict[str, Any]) -> None:
        self.fleet = Fleet()
        self.router = Router(RouterSettings(**router), self.fleet)
        self.metrics = Metrics(self.router)
        over = connector(TransferConfig(connector="nixl")) if router.get("transfer") else None
        self.wire = WireServer(self.router, WireSettings(**wire), self.metrics, self.clock, over)
        self.skipped = 0.0
        self.stands_at: float | None = None
        self.fakes: dict[str, FakeWorker] = {}
        self.charged: list[Worker] = []  # all workers, also removed ones
        self.clients: list[Client] = []
        self.checks_at_end: list[Callable[[], None]] = []

    def clock(self) -> float:
        now = time.monotonic() if self.stands_at is None else self.stands_at
        return now + self.skipped

    def stand_still(self) -> None:
        """Stop the router's clock; only `skip` moves it."""
        self.stands_at = time.monotonic()

    def skip(self, seconds: float) -> None:
        self.skipped += seconds

    @property
    def port(self) -> int:
        return self.wire.port

    @property
    def fake(self) -> FakeWorker:
        [only] = self.fakes.values()
        return only

    async def start(self, fakes: tuple[Fake, ...]) -> None:
        for each in fakes:
            await self.add(each)
        await self.wire.start("127.0.0.1", 0)

    async def add(self, spec: Fake) -> FakeWorker:
        """Start a worker and add it to the fleet."""
        fake = FakeWorker(spec.name, model=spec.model, max_model_len=spec.max_model_len)
        fake.tls = spec.tls
        await fake.listen()
        self.fakes[spec.name] = fake
        self.charged.append(self.fleet.roster.add(spec_of(spec, fake.url)))
        if spec.up:
            self.up(spec.name)
            self.fleet.roster.set_served(spec.name, (spec.model,), spec.max_model_len)
        return fake

    def up(self, name: str) -> None:
        for _ in range(2):
            self.fleet.health.probe_ok(name, self.clock())

    def down(self, name: str) -> None:
        for _ in range(3):
            self.fleet.health.probe_failed(name)

    def served(self) -> list[Call]:
        """Return the calls to all workers except probes and counts, in order."""
        calls = [call for fake in self.fakes.values() for call in fake.served]
        return sorted(calls, key=lambda call: call.arrived)

    def always(self, script: Script) -> None:
        """Answer all calls to all workers with a script."""
        for fake in self.fakes.values():
            fake.always(script)

    def set_tenants(self, *specs: TenantSpec, **keys: str) -> None:
        """Give the router these tenants; `keys`: their keys by name."""
        hashes = {sha256(key.encode()).digest(): name for name, key in keys.items()}
        self.router.tenants.replace(specs, hashes)

    def tenant(self, name: str = "a") -> Tenant:
        """Return the router's state of a tenant."""
        return present(self.router.tenants.get(name))

    def hold(self) -> asyncio.Event:
        """Answer all calls once the returned event is set."""
        gate = asyncio.Event()
        self.always(scripts.gated(gate, scripts.answer()))
        return gate

    def worker(self, name: str = "w0") -> Worker:
        """Return the router's state of a worker."""
        return present(self.fleet.roster.get(name))

    async def client(self, **options: Any) -> Client:
        client = await Client.connect(self.port, **options)
        self.clients.append(client)
        return client

    async def send(self, data: bytes, **options: Any) -> Client:
        """Send a request on a new connection; its response is not read yet."""
        client = await self.client(**options)
        await client.send(data)
        return client

    async def ask(self, data: bytes, *, within: float = DEADLINE_S, **options: Any) -> Answer:
        """Send a request on a new connection; return its response."""
        client = await self.client(**options)
        try:
            return await client.ask(data, within=within)
        finally:
            client.close()

    def charges(self) -> dict[str, tuple[int, ...]]:
        """Return the charges of workers that have any."""
        charges = {
            worker.name: (
                worker.requests,
                worker.prefill_tokens,
                worker.decode_tokens,
                worker.kv_tokens,
                worker.num_decoding,
            )
            for worker in self.charged
        }
        return {name: charge for name, charge in charges.items() if any(charge)}

    def unfinished(self) -> str:
        """Describe what is unfinished; empty if nothing is."""
        counts = self.metrics.upstream_connections()
        left = {
            "charges": self.charges(),
            "queued": len(self.router.queue),
            "queued bytes": self.router.queue.bytes,
            "bodies": self.wire.body_budget.held,
            "answers expected": len(self.router.fleet._silent),
            "releases": len(self.wire.releases),
            "connections at work": [each for each in counts if each[1] == "busy" and each[2] > 0],
        }
        return ", ".join(f"{name}: {value}" for name, value in left.items() if value)

    async def settled(self) -> None:
        """Wait until no charge, ticket or busy connection is left."""
        await eventually(lambda: not self.unfinished(), self.unfinished)

    async def pass_time(self, seconds: float) -> None:
        """Move the router's clock, and wait for two checks for overdue items."""
        self.skip(seconds)
        await self.swept()

    async def swept(self) -> None:
        """Wait for two checks for overdue items."""
        for _ in range(2):
            due = self.wire.ticks.due
            await eventually(lambda due=due: self.wire.ticks.due != due)  # type: ignore[misc]

    def _clients_left(self) -> str:
        """Describe the connections that should have ended.

        A test in another process may connect to a port that was its worker's a moment ago.
        """
        foreign = ports_of_other_processes()
        left = [
            {name: getattr(each, name) for name in ("_leaving", "_reading_paused", "_exchange")}
            for each in self.wire.clients
            if (each._transport.get_extra_info("peername") or (None, None))[1] not in foreign
        ]
        return f"clients are left: {left}" if left else ""

    async def stop(self) -> None:
        """Close everything; check that nothing is left and that no worker saw a fault."""
        for client in self.clients:
            client.close()
        look_at = time.monotonic() + FOREIGN_AFTER_S
        try:
            await self.settled()
            for check in self.checks_at_end:
                check()
            await eventually(
                lambda: (
                    not self.wire.clients
                    or (time.monotonic() > look_at and not self._clients_left())
                ),
                self._clients_left,
            )
        finally:
            await self.wire.close()
            for fake in self.fakes.values():
                await fake.stop()
        faults = {name: fake.faults for name, fake in self.fakes.items() if fake.faults}
        assert not faults, faults


def spec_of(each: Fake, url: str) -> WorkerSpec:
    """Return a worker's spec as an operator would write it."""
    return WorkerSpec(
        each.name,
        url,
        each.role,
        each.model,
        max_requests=each.max_requests,
        api_key=each.api_key,
        tls=each.worker_tls,
    )


async def eventually(
    what: Callable[[], object],
    why: Callable[[], object] = lambda: "still not so",
    *,
    within: float = DEADLINE_S,
) -> None:
    """Poll until a condition holds."""
    give_up = time.monotonic() + within
    while not what():
        assert time.monotonic() < give_up, why()
        await asyncio.sleep(0.005)


def ports_of_other_processes() -> set[int]:
    """Return the ports of this machine's connections that are open in other processes."""
    return {
        found.laddr.port
        for found in psutil.net_connections("tcp")
        if found.status == psutil.CONN_ESTABLISHED and found.pid != os.getpid()
    }


def sockets() -> int:
    """Count this process's open sockets."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  # numbers are wanted, not paths
        try:
            count += stat.S_ISSOCK(os.fstat(int(fd)).st_mode)
        except OSError:
            continue  # the listing's own
    return count

"""A killed router: clients see a clean end, and the next router serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.soak.router import children_of, wait_idle
from tests.faults import dns
from tests.faults.clients import DISCONNECTED, LEFT, NO_ROUTER, REFUSED, TORN, WHOLE, ClientLoad
from tests.faults.faulty_fleet import KEYS, FaultyFleet
from tests.proxy.wire.raw_client import Client, get
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port

READY_S, CLIENTS = 90.0, 8
LOGS = "  logs: {format: json, requests: true, level: debug}\n"


@asynccontextmanager
async def faulty_workers(seed: int, no_names: Path | None = None) -> AsyncIterator[FaultyFleet]:
    workers = FaultyFleet(seed, no_names)
    await workers.start()
    try:
        yield workers
    finally:
        await workers.stop()


@asynccontextmanager
async def running(
    fleet: Path, port: int, log_to: Path | None = None, env: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a router from the command line; it must end well unless the test has killed it."""
    log_file = log_to or fleet.parent / "log"
    with log_file.open("ab") as log:
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vllm_sched.cli.main", "router", str(fleet),
            stdout=log, stderr=log, env=env,
        )  # fmt: skip
    try:
        await wait_until_ready(port)
        yield router
        if router.returncode is None:
            router.terminate()
            assert await asyncio.wait_for(router.wait(), READY_S) == 0
            assert log_to is not None or "Traceback" not in log_file.read_text()
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()


async def wait_until_ready(port: int) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            try:
                client = await Client.connect(port)
                answer = await client.ask(get("/ready"), within=READY_S)
                client.close()
            except (OSError, *DISCONNECTED):
                await asyncio.sleep(0.05)
                continue
            if answer.status == 200:
                return
            await asyncio.sleep(0.05)


async def test_router_killed_under_load_and_restarted(tmp_path: Path) -> None:
    port, fleet = free_port(), tmp_path / "fleet.yaml"
    clients = ClientLoad(port, 5)
    async with faulty_workers(5) as workers:
        fleet.write_text(workers.fleet(listen=port, admin=free_port()))
        async with running(fleet, port) as router:
            clients.start(CLIENTS)
            await wait_until(lambda: clients.outcomes[WHOLE] > 50)
            router.kill()
            await router.wait()
        await wait_until(lambda: clients.outcomes[NO_ROUTER] > 0)
        before = clients.outcomes[WHOLE]
        async with running(fleet, port):
            # The new router finds the fleet without help.
            await wait_until(lambda: clients.outcomes[WHOLE] > before + 50)
            await clients.end()
    assert set(clients.outcomes) <= {WHOLE, TORN, REFUSED, LEFT, NO_ROUTER}
    # Only requests in flight at the kill.
    assert clients.outcomes[TORN] <= 2 * CLIENTS


async def test_killed_process_of_two_is_restarted_under_load(tmp_path: Path) -> None:
    """Name lookups fail meanwhile; the tenants' requests in flight return to zero."""
    env, no_names = dns.failing_lookups(tmp_path)
    port, fleet, log = free_port(), tmp_path / "fleet.yaml", tmp_path / "log"
    clients = ClientLoad(port, 7, keys=tuple(KEYS.values()))
    async with faulty_workers(7, no_names) as workers:
        fleet.write_text(workers.fleet(listen=port, admin=free_port(), processes=2, tenants=True))
        no_names.touch()
        async with running(fleet, port, env=env) as router:
            await wait_until(lambda: "admin http" in log.read_text())  # logged once both serve
            clients.start(CLIENTS)
            await wait_until(
                lambda: clients.outcomes[WHOLE] > 50 and dns.LOOKUP_FAILED_LINE in log.read_text()
            )
            no_names.unlink()
            os.kill(children_of(router.pid)[0], signal.SIGKILL)
            await wait_until(lambda: "restarting in" in log.read_text())
            before = clients.outcomes[WHOLE]
            await wait_until(lambda: clients.outcomes[WHOLE] > before + 50)
            await wait_until(lambda: len(children_of(router.pid)) == 2)
            await clients.end()
            assert await wait_idle(port) <= 0
    assert set(clients.outcomes) <= {WHOLE, TORN, REFUSED, LEFT, NO_ROUTER}
    assert clients.outcomes[TORN] <= 2 * CLIENTS


async def test_full_disk_under_the_log_does_not_affect_clients(tmp_path: Path) -> None:
    port, fleet = free_port(), tmp_path / "fleet.yaml"
    clients = ClientLoad(port, 6, dripped=0.0)
    async with faulty_workers(6) as workers:
        fleet.write_text(workers.fleet(listen=port, admin=free_port()) + LOGS)
        async with running(fleet, port, Path("/dev/full")):
            clients.start(CLIENTS)
            await wait_until(lambda: clients.outcomes[WHOLE] > 200)
            await clients.end()
    assert set(clients.outcomes) <= {WHOLE, LEFT}


async def wait_until(condition: Callable[[], object]) -> None:
    await eventually(condition, within=READY_S)

"""A killed router: clients see a clean end, and the next router serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks import soak
from tests.faults import dns
from tests.faults.clients import DISCONNECTED, LEFT, NO_ROUTER, REFUSED, TORN, WHOLE, ClientLoad
from tests.faults.faulty_fleet import KEYS, FaultyFleet
from tests.proxy.wire.raw_client import Client, get
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port

READY_S, CLIENTS = 90.0, 8
LOGS = "  logs: {format: json, requests: true, level: debug}\n"


async def start(
    fleet: Path, log_to: Path | None = None, env: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a router process from the command line."""
    log = (log_to or fleet.parent / "log").open("ab")
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vllm_sched.cli.main", "router", str(fleet),
            stdout=log, stderr=log, env=env,
        )  # fmt: skip
    finally:
        log.close()


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
    workers = FaultyFleet(5)
    await workers.start()
    port, fleet = free_port(), tmp_path / "fleet.yaml"
    fleet.write_text(workers.fleet(listen=port, admin=free_port()))
    router = await start(fleet)
    clients, over = ClientLoad(port, 5), asyncio.Event()
    try:
        await wait_until_ready(port)
        requests = [asyncio.create_task(clients.play(n, over.is_set)) for n in range(CLIENTS)]
        await wait_until(lambda: clients.outcomes[WHOLE] > 50)
        router.kill()
        await router.wait()
        await wait_until(lambda: clients.outcomes[NO_ROUTER] > 0)
        before = Counter(clients.outcomes)
        router = await start(fleet)
        await wait_until_ready(port)
        # The new router finds the fleet without help.
        await wait_until(lambda: clients.outcomes[WHOLE] > before[WHOLE] + 50)
        over.set()
        await asyncio.gather(*requests)
        assert clients.wrong == []
        assert set(clients.outcomes) <= {WHOLE, TORN, REFUSED, LEFT, NO_ROUTER}
        # Only requests in flight at the kill.
        assert clients.outcomes[TORN] <= 2 * CLIENTS
        router.terminate()
        assert await asyncio.wait_for(router.wait(), READY_S) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
        await workers.stop()


async def test_killed_process_of_two_is_restarted_under_load(tmp_path: Path) -> None:
    """Name lookups fail meanwhile; the tenants' requests in flight return to zero."""
    env, no_names = dns.failing_lookups(tmp_path)
    workers = FaultyFleet(7, no_names)
    await workers.start()
    port, fleet, log = free_port(), tmp_path / "fleet.yaml", tmp_path / "log"
    fleet.write_text(workers.fleet(listen=port, admin=free_port(), processes=2, tenants=True))
    no_names.touch()
    router = await start(fleet, env=env)
    clients, over = ClientLoad(port, 7, keys=tuple(KEYS.values())), asyncio.Event()
    try:
        await wait_until_ready(port)
        await wait_until(lambda: "admin http" in log.read_text())  # logged once both serve
        requests = [asyncio.create_task(clients.play(n, over.is_set)) for n in range(CLIENTS)]
        await wait_until(
            lambda: clients.outcomes[WHOLE] > 50 and dns.LOOKUP_FAILED_LINE in log.read_text()
        )
        no_names.unlink()
        os.kill(soak.children_of(router.pid)[0], signal.SIGKILL)
        await wait_until(lambda: "restarting in" in log.read_text())
        before = clients.outcomes[WHOLE]
        await wait_until(lambda: clients.outcomes[WHOLE] > before + 50)
        await wait_until(lambda: len(soak.children_of(router.pid)) == 2)
        over.set()
        await asyncio.gather(*requests)
        assert clients.wrong == []
        assert set(clients.outcomes) <= {WHOLE, TORN, REFUSED, LEFT, NO_ROUTER}
        assert clients.outcomes[TORN] <= 2 * CLIENTS
        assert await soak.wait_idle(port) <= 0
        router.terminate()
        assert await asyncio.wait_for(router.wait(), READY_S) == 0
        assert "Traceback" not in log.read_text()
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
        await workers.stop()


async def test_full_disk_under_the_log_does_not_affect_clients(tmp_path: Path) -> None:
    workers = FaultyFleet(6)
    await workers.start()
    port, fleet = free_port(), tmp_path / "fleet.yaml"
    fleet.write_text(workers.fleet(listen=port, admin=free_port()) + LOGS)
    router = await start(fleet, Path("/dev/full"))
    clients, over = ClientLoad(port, 6, dripped=0.0), asyncio.Event()
    try:
        await wait_until_ready(port)
        requests = [asyncio.create_task(clients.play(n, over.is_set)) for n in range(CLIENTS)]
        await wait_until(lambda: clients.outcomes[WHOLE] > 200)
        over.set()
        await asyncio.gather(*requests)
        assert clients.wrong == []
        assert set(clients.outcomes) <= {WHOLE, LEFT}
        router.terminate()
        assert await asyncio.wait_for(router.wait(), READY_S) == 0
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
        await workers.stop()


async def wait_until(condition: Callable[[], object]) -> None:
    await eventually(condition, within=READY_S)

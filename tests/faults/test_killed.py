"""A router that is killed, as by the kernel: clients see a clean end, and the next one serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks import soak
from tests.faults import names
from tests.faults.crowd import GONE, LEFT, NOBODY, REFUSED, TORN, WHOLE, Crowd
from tests.faults.troupe import KEYS, Troupe
from tests.proxy.wire.raw_client import Client, get
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port

READY_S, CLIENTS = 90.0, 8
LOGS = "  logs: {format: json, requests: true, level: debug}\n"


async def start(
    fleet: Path, log_to: Path | None = None, env: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a router as its users do."""
    log = (log_to or fleet.parent / "log").open("ab")
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vllm_sched.cli.main", "router", str(fleet),
            stdout=log, stderr=log, env=env,
        )  # fmt: skip
    finally:
        log.close()


async def serves(port: int) -> None:
    """Wait until it can serve."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                client = await Client.connect(port)
                answer = await client.ask(get("/ready"), within=READY_S)
                client.close()
            except (OSError, *GONE):
                await asyncio.sleep(0.05)
                continue
            if answer.status == 200:
                return
            await asyncio.sleep(0.05)


async def test_killed_under_load_and_started_again(tmp_path: Path) -> None:
    troupe = Troupe(5)
    await troupe.start()
    port, fleet = free_port(), tmp_path / "fleet.yaml"
    fleet.write_text(troupe.fleet(listen=port, admin=free_port()))
    router = await start(fleet)
    crowd, over = Crowd(port, 5), asyncio.Event()
    try:
        await serves(port)
        asked = [asyncio.create_task(crowd.play(n, over.is_set)) for n in range(CLIENTS)]
        await until(lambda: crowd.outcomes[WHOLE] > 50)
        router.kill()
        await router.wait()
        await until(lambda: crowd.outcomes[NOBODY] > 0)
        before = Counter(crowd.outcomes)
        router = await start(fleet)
        await serves(port)
        # The fleet is found again without anybody's help, and all as before.
        await until(lambda: crowd.outcomes[WHOLE] > before[WHOLE] + 50)
        over.set()
        await asyncio.gather(*asked)
        assert crowd.wrong == []
        assert set(crowd.outcomes) <= {WHOLE, TORN, REFUSED, LEFT, NOBODY}
        # Those that were under way when it died, and none else.
        assert crowd.outcomes[TORN] <= 2 * CLIENTS
        router.terminate()
        assert await asyncio.wait_for(router.wait(), READY_S) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
        await troupe.stop()


async def test_one_process_of_two_is_killed_under_load_of_tenants(tmp_path: Path) -> None:
    """And names can't be looked up meanwhile; what tenants have in flight is nothing again."""
    env, no_names = names.failing(tmp_path)
    troupe = Troupe(7, no_names)
    await troupe.start()
    port, fleet, log = free_port(), tmp_path / "fleet.yaml", tmp_path / "log"
    fleet.write_text(troupe.fleet(listen=port, admin=free_port(), processes=2, tenants=True))
    no_names.touch()
    router = await start(fleet, env=env)
    crowd, over = Crowd(port, 7, keys=tuple(KEYS.values())), asyncio.Event()
    try:
        await serves(port)
        await until(lambda: "admin http" in log.read_text())  # said once both serve
        asked = [asyncio.create_task(crowd.play(n, over.is_set)) for n in range(CLIENTS)]
        await until(lambda: crowd.outcomes[WHOLE] > 50 and names.SEEN in log.read_text())
        no_names.unlink()
        os.kill(soak.children_of(router.pid)[0], signal.SIGKILL)
        await until(lambda: "restarting in" in log.read_text())
        before = crowd.outcomes[WHOLE]
        await until(lambda: crowd.outcomes[WHOLE] > before + 50)
        await until(lambda: len(soak.children_of(router.pid)) == 2)
        over.set()
        await asyncio.gather(*asked)
        assert crowd.wrong == []
        assert set(crowd.outcomes) <= {WHOLE, TORN, REFUSED, LEFT, NOBODY}
        assert crowd.outcomes[TORN] <= 2 * CLIENTS
        assert await soak.calm(port) <= 0
        router.terminate()
        assert await asyncio.wait_for(router.wait(), READY_S) == 0
        assert "Traceback" not in log.read_text()
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
        await troupe.stop()


async def test_a_full_disk_under_its_log_is_nothing_to_its_clients(tmp_path: Path) -> None:
    troupe = Troupe(6)
    await troupe.start()
    port, fleet = free_port(), tmp_path / "fleet.yaml"
    fleet.write_text(troupe.fleet(listen=port, admin=free_port()) + LOGS)
    router = await start(fleet, Path("/dev/full"))
    crowd, over = Crowd(port, 6, dripped=0.0), asyncio.Event()
    try:
        await serves(port)
        asked = [asyncio.create_task(crowd.play(n, over.is_set)) for n in range(CLIENTS)]
        await until(lambda: crowd.outcomes[WHOLE] > 200)
        over.set()
        await asyncio.gather(*asked)
        assert crowd.wrong == []
        assert set(crowd.outcomes) <= {WHOLE, LEFT}
        router.terminate()
        assert await asyncio.wait_for(router.wait(), READY_S) == 0
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
        await troupe.stop()


async def until(what: Callable[[], object]) -> None:
    """Wait for what no event tells."""
    await eventually(what, within=READY_S)

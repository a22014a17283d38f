"""Start the mock workers, our router and the peer routers.

For hand-overs, the routers are started a second time, over a prefill and a decode worker.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.router import mock, processes
from benchmarks.router.load import HOST, closed_loop
from benchmarks.router.opponents import Opponent, peers
from benchmarks.router.prompts import Prompts
from vllm_sched.workers.launch import Worker, WorkerError, free_port

DIRECT, OURS = "direct", "vllm-sched"
READY_TIMEOUT_S = 60.0
TRIAL_S = 0.2
STOP_GRACE_S = 5.0


@dataclass(frozen=True)
class Cpus:
    """CPU affinities; None means any CPU."""

    routers: frozenset[int] | None = None
    others: frozenset[int] | None = None

    @classmethod
    def apart(cls) -> Cpus:
        """Return the last CPU for routers and the rest for others, if there are two."""
        *others, last = sorted(os.sched_getaffinity(0))
        return cls(frozenset({last}), frozenset(others)) if others else cls()


@dataclass(frozen=True)
class Side:
    """A router or the bare worker, to be measured."""

    name: str
    port: int
    router: Worker | None = None  # None for the bare worker
    hands_over: bool = False

    def pids(self) -> list[int]:
        """Return the router's processes; raise with the end of its log if it died."""
        if self.router is None:
            return []
        self.router.check()
        assert self.router.pid is not None
        return processes.tree(self.router.pid)


@asynccontextmanager
async def stage(
    folder: Path,
    opponents: Sequence[Opponent],
    cpus: Cpus,
    report_progress: Callable[[str], None],
    *,
    combined: bool = True,
    hands_over: bool = False,
) -> AsyncIterator[list[Side]]:
    """Start all processes and yield the sides, the bare worker first, once they serve."""
    ports = [free_port() for _ in range(4)]
    urls = [f"http://{HOST}:{port}" for port in ports]
    mocks = [*map(str, ports[:2]), "--prefill", str(ports[2]), "--decode", str(ports[3])]
    command = [sys.executable, mock.__file__, *mocks]
    routers: list[tuple[Worker, bool]] = []
    for over, wanted, pair in ((False, combined, urls[:2]), (True, hands_over, urls[2:])):
        if wanted:
            their = [_their_router(folder, o, pair) for o in opponents if o.hands_over is over]
            routers += [(router, over) for router in (our_router(folder, pair, over), *their)]
    async with AsyncExitStack() as stack:
        report_progress("starting the mock workers")
        with processes.running_on(cpus.others):
            await stack.enter_async_context(process("mock workers", command, ports[0]))
        sides = [Side(DIRECT, ports[0])]
        with processes.running_on(cpus.routers):
            for router, _ in routers:
                stack.push_async_callback(asyncio.to_thread, router.stop)
                router.start()
        for router, over in routers:
            report_progress(f"waiting for {router.name}")
            await wait_served(router)
            sides.append(Side(router.name, router.port, router, over))
        yield sides


def our_router(folder: Path, urls: Sequence[str], hands_over: bool = False) -> Worker:
    """Return our router with its defaults.

    `disaggregate_above: auto` would not hand over between mock workers, so it is set to 1.
    """
    first, second = ("prefill", "decode") if hands_over else ("short", "long")
    fleet: dict[str, Any] = {
        "model": mock.MODEL,
        "workers": [
            {"name": f"{first[0]}0", "role": first, "url": urls[0]},
            {"name": f"{second[0]}0", "role": second, "url": urls[1]},
        ],
    }
    if hands_over:
        fleet |= {"transfer": "nixl", "routing": {"disaggregate_above": 1}}
    return router_process(OURS, folder / ("handover.yaml" if hands_over else "fleet.yaml"), fleet)


def router_process(name: str, path: Path, fleet: dict[str, Any]) -> Worker:
    """Return our router as users start it, with a fleet file at `path` that names free ports."""
    port = free_port()
    router = {"host": HOST, "port": port, "admin": {"host": HOST, "port": free_port()}}
    fleet = {**fleet, "router": router | fleet.get("router", {})}
    path.write_text(yaml.safe_dump(fleet, sort_keys=False))
    script = Path(sys.executable).with_name("vllm-sched")
    return process(name, [str(script), "router", str(path.absolute())], port)


def _their_router(folder: Path, opponent: Opponent, urls: Sequence[str]) -> Worker:
    port = free_port()
    command = opponent.command(peers(folder), urls, (port, free_port()))
    return process(opponent.name, command, port)


def process(name: str, command: Sequence[str], port: int) -> Worker:
    """Return a process whose environment names no HTTP proxy."""
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return Worker(
        command, port=port, name=name, env=env, deadline_s=READY_TIMEOUT_S, grace_s=STOP_GRACE_S
    )


async def wait_served(router: Worker) -> None:
    """Wait until the router serves completions: a healthy router may not have its workers yet."""
    await asyncio.to_thread(router.wait_ready)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        router.check()
        async with closed_loop(router.port, Prompts(1024, seed=0), connections=2) as load:
            await asyncio.sleep(TRIAL_S)
        if load.tally.done and not load.errors:
            return
        if time.monotonic() > deadline:
            errors = ", ".join(load.errors)
            raise WorkerError(f"{router.name} is healthy, but serves no completions: {errors}")

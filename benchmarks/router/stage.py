"""Puts everything in place: two mock workers, our router over them, and the opponents over them.

For hand-overs, the same once more over a prefill and a decode worker.
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

import yaml

from benchmarks.router import mock, processes
from benchmarks.router.load import HOST, closed_loop
from benchmarks.router.opponents import Opponent, peers
from benchmarks.router.prompts import Prompts
from vllm_sched.workers.launch import Worker, WorkerError, free_port

DIRECT, OURS = "direct", "vllm-sched"
READY_S = 60.0
REHEARSAL_S = 0.2
GRACE_S = 3.0


@dataclass(frozen=True)
class Cpus:
    """Who runs where; None: anywhere."""

    routers: frozenset[int] | None = None
    others: frozenset[int] | None = None

    @classmethod
    def apart(cls) -> Cpus:
        """Give routers a CPU of their own, if there are two."""
        *others, last = sorted(os.sched_getaffinity(0))
        return cls(frozenset({last}), frozenset(others)) if others else cls()


@dataclass(frozen=True)
class Side:
    """Something that answers requests, to be measured."""

    name: str
    port: int
    router: Worker | None = None  # None for the bare worker
    hands_over: bool = False

    def pids(self) -> list[int]:
        """Return its processes; where the router died, raise with what it said last."""
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
    tell: Callable[[str], None],
    *,
    whole: bool = True,
    hands_over: bool = False,
) -> AsyncIterator[list[Side]]:
    """Start all, wait until each answers, and yield the sides; the bare worker is the first."""
    ports = [free_port() for _ in range(4)]
    urls = [f"http://{HOST}:{port}" for port in ports]
    mocks = [*map(str, ports[:2]), "--prefill", str(ports[2]), "--decode", str(ports[3])]
    command = [sys.executable, mock.__file__, *mocks]
    routers: list[tuple[Worker, bool]] = []
    for over, wanted, pair in ((False, whole, urls[:2]), (True, hands_over, urls[2:])):
        if wanted:
            theirs = [_theirs(folder, each, pair) for each in opponents if each.hands_over is over]
            routers += [(each, over) for each in (our_router(folder, pair, over), *theirs)]
    async with AsyncExitStack() as stack:
        tell("starting the mock workers")
        with processes.running_on(cpus.others):
            await stack.enter_async_context(_process("mock workers", command, ports[0]))
        sides = [Side(DIRECT, ports[0])]
        with processes.running_on(cpus.routers):
            for router, _ in routers:
                stack.push_async_callback(asyncio.to_thread, router.stop)
                router.start()
        for router, over in routers:
            tell(f"waiting for {router.name}")
            await _wait_served(router)
            sides.append(Side(router.name, router.port, router, over))
        yield sides


def our_router(folder: Path, urls: Sequence[str], hands_over: bool = False) -> Worker:
    """Describe our router as its users start it: with its defaults.

    By itself it would leave out hand-overs that are worth as little as those between mock workers.
    """
    port = free_port()
    first, second = ("prefill", "decode") if hands_over else ("short", "long")
    fleet: dict[str, object] = {
        "model": mock.MODEL,
        "workers": [
            {"name": f"{first[0]}0", "role": first, "url": urls[0]},
            {"name": f"{second[0]}0", "role": second, "url": urls[1]},
        ],
        "router": {"host": HOST, "port": port, "admin": {"host": HOST, "port": free_port()}},
    }
    if hands_over:
        fleet |= {"transfer": "nixl", "routing": {"disaggregate_above": 1}}
    path = folder / ("handover.yaml" if hands_over else "fleet.yaml")
    path.write_text(yaml.safe_dump(fleet, sort_keys=False))
    script = Path(sys.executable).with_name("vllm-sched")
    return _process(OURS, [str(script), "router", str(path.absolute())], port)


def _theirs(folder: Path, opponent: Opponent, urls: Sequence[str]) -> Worker:
    port = free_port()
    command = opponent.command(peers(folder), urls, (port, free_port()))
    return _process(opponent.name, command, port)


def _process(name: str, command: Sequence[str], port: int) -> Worker:
    """Describe a process with no proxy between it and loopback."""
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return Worker(command, port=port, name=name, env=env, deadline_s=READY_S, grace_s=GRACE_S)


async def _wait_served(router: Worker) -> None:
    """Wait until completions come back; being healthy is not yet having workers."""
    await asyncio.to_thread(router.wait_ready)
    give_up = time.monotonic() + READY_S
    while True:
        router.check()
        async with closed_loop(router.port, Prompts(1024, seed=0), connections=2) as load:
            await asyncio.sleep(REHEARSAL_S)
        if load.tally.done and not load.errors:
            return
        if time.monotonic() > give_up:
            errors = ", ".join(load.errors)
            raise WorkerError(f"{router.name} is healthy, but serves no completions: {errors}")

"""A router under load for as long as one likes, while everything goes wrong with its workers.

    python -m benchmarks.soak --minutes 30 --seed 1 --kill-router 120

The router is a process of its own, as its users start it, and so are the clients; the workers are
fakes in this one. With `--kill-router` it is killed and started again every so many seconds; with
`--processes 2 --kill-member 60` one of its processes is, in the first half of the time: whether
anything grows is seen in the second; with `--stall-member 60` one stands still for some seconds and
goes on; with `--tenants` the requests are two tenants'. With `--guarded`
clients and a worker speak TLS, some requests are refused for their wait, and a third tenant has
files of requests run, on a disk that fills up. Compiled modules are used where there are any, as by
every router, and plain ones with VLLM_SCHED_COMPILED=0. What befalls whom follows from `--seed`.

What is printed each minute: how requests ended, what the router holds, its memory, its open files.
The exit status says whether any request hung or had a wrong answer, a line none or two, anything
was left at the end, or memory or files have grown since the first minute, or the first after the
last kill of a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import aiohttp
import openai

from proxy.compiled import locate
from tests.faults import disk, dns
from tests.faults.batch_run import BatchRun
from tests.faults.clients import LEFT, NO_ROUTER, ClientLoad
from tests.faults.faulty_fleet import KEYS, FaultyFleet
from tests.proxy.certificates import Authority
from vllm_sched.workers.launch import free_port

T = TypeVar("T")

ROW_S, READY_S, CALM_S = 60.0, 60.0, 60.0
YOUNG_S = ROW_S / 2  # a process holds less than it will
NIGHT_S = 300.0  # for a file of requests: a line that fails rests for up to a minute
STILL_S = (1.0, 8.0)  # of a process that goes on then; after thirty it would be killed
WIDTH = 10
COLUMNS = (
    "minute", "sent", "whole", "refused", "torn", "left", "nobody", "wrong", "slowest", "rss MiB",
    "files", "in flight",
)  # fmt: skip
# What has to be nought when nobody asks anything.
IN_FLIGHT = (
    "proxy_worker_inflight_requests{",
    "proxy_queue_requests ",
    "proxy_queue_bytes ",
    "proxy_client_connections ",
    "proxy_tenant_inflight_requests{",
)
MORE_MEMORY, MORE_FILES = 1.15, 16  # than at first
NO_ROOM = 507


def children_of(pid: int) -> list[int]:
    """List the processes that one has begun."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return []


async def in_flight(port: int, tls: ssl.SSLContext | None = None) -> float:
    """Add up what a router's page says is under way."""
    total = 0.0
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url_of(port, tls)}/metrics", ssl=tls or True) as answer,
    ):
        for line in (await answer.text()).splitlines():
            if line.startswith(IN_FLIGHT) and not line.startswith("#"):
                total += float(line.rsplit(" ", 1)[1])
    return total - 1  # this very connection


def url_of(port: int, tls: ssl.SSLContext | None) -> str:
    """Write where the router is."""
    return f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"


async def calm(port: int, tls: ssl.SSLContext | None = None) -> float:
    """Wait until nothing is under way; return what is for too long."""
    give_up = time.monotonic() + CALM_S
    while True:
        flying = await in_flight(port, tls)
        if flying <= 0 or time.monotonic() > give_up:
            return flying
        await asyncio.sleep(0.2)


class Router:
    """The process under test."""

    def __init__(
        self, fleet: Path, port: int, env: dict[str, str], tls: ssl.SSLContext | None
    ) -> None:
        self.fleet, self.port, self.env, self.tls = fleet, port, env, tls
        self.process: asyncio.subprocess.Process | None = None
        self.kills = self.lost = self.stills = 0
        self.young_until = 0.0
        self.recovered_s: list[float] = []

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        with (self.fleet.parent / "router.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "vllm_sched.cli.main", "router", str(self.fleet),
                stdout=log, stderr=log, env=self.env,
            )  # fmt: skip
        give_up = time.monotonic() + READY_S
        while not await self.ready():
            if time.monotonic() > give_up or self.process.returncode is not None:
                raise RuntimeError((self.fleet.parent / "router.log").read_text()[-2000:])
            await asyncio.sleep(0.05)

    async def ready(self) -> bool:
        """Whether it says that it can serve."""
        with suppress(aiohttp.ClientError):
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{url_of(self.port, self.tls)}/ready", ssl=self.tls or True) as answer,
            ):
                return answer.status == 200
        return False

    async def die(self) -> None:
        """Kill it, start another, and note how long nobody served."""
        assert self.process is not None
        began = time.monotonic()
        self.process.kill()
        await self.process.wait()
        await self.start()
        self.kills += 1
        self.recovered_s.append(time.monotonic() - began)

    def lose(self, dice: random.Random) -> None:
        """Kill one of its processes."""
        assert self.process is not None
        if there := children_of(self.process.pid):
            self.lost += 1
            os.kill(dice.choice(there), signal.SIGKILL)
            self.young_until = time.monotonic() + YOUNG_S

    async def stand_still(self, dice: random.Random) -> None:
        """Have one of its processes do nothing for a while, and then go on."""
        assert self.process is not None
        one = dice.choice(children_of(self.process.pid) or [self.process.pid])
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
            self.stills += 1
        try:
            await asyncio.sleep(dice.uniform(*STILL_S))
        finally:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)

    async def stop(self) -> int:
        """Ask it to go."""
        assert self.process is not None
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), READY_S)

    def holds(self) -> tuple[float, int]:
        """Return its resident MiB and its open files, those of all its processes together."""
        assert self.process is not None
        kib = files = 0
        for pid in (self.process.pid, *children_of(self.process.pid)):
            folder = Path(f"/proc/{pid}")
            with suppress(OSError):
                status = (folder / "status").read_text()
                kib += int(status.partition("VmRSS:")[2].split()[0])
                files += len(list((folder / "fd").iterdir()))
        return kib / 1024, files


async def clients(given: argparse.Namespace) -> None:
    """Be the clients, and print what became of their requests so far, a line each second."""
    keys = tuple(KEYS.values()) if given.tenants else ()
    tls = ssl.create_default_context(cafile=given.ca) if given.ca else None
    crowd = ClientLoad(given.clients_of, given.seed, keys=keys, tls=tls)
    until = time.monotonic() + given.minutes * 60 - 5
    over = lambda: time.monotonic() > until  # noqa: E731

    def tell() -> None:
        said = {"sent": crowd.sent, "slowest": crowd.slowest_s, "wrong": crowd.wrong[:20]}
        print(json.dumps(said | {"outcomes": crowd.outcomes}), flush=True)

    async def tells() -> None:
        while not over():
            tell()
            await asyncio.sleep(1.0)

    await asyncio.gather(tells(), *(crowd.play(each, over) for each in range(given.clients)))
    tell()


async def night(router: Router, seed: int) -> str:
    """Have a file of requests run; say what is wrong with what came of it, if anything is."""
    assert router.tls is not None
    one = BatchRun(url_of(router.port, router.tls), seed, router.tls)
    try:
        async with asyncio.timeout(NIGHT_S):
            await asked(one.begin)
            while not await asked(one.is_done):  # noqa: ASYNC110  # another asks, of another
                await asyncio.sleep(0.5)
            await asked(one.judge)
    except (AssertionError, openai.APIStatusError) as error:
        return repr(error)[:500]
    except TimeoutError:
        return f"a file of requests had no end within {NIGHT_S:g} s"
    finally:
        await one.close()
    return ""


async def asked(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until somebody is there to answer, and has room for it."""
    while True:
        try:
            return await ask()
        except openai.APIConnectionError:
            await asyncio.sleep(0.2)
        except openai.InternalServerError as error:
            if error.status_code != NO_ROOM:
                raise
            await asyncio.sleep(0.2)


async def soak(given: argparse.Namespace) -> int:
    """Run it all, and print the table."""
    # Workers that speak TLS write on to a router that hung up in that turn of the loop.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        kept_on = disk.ProcessDisk(Path(folder)) if given.guarded else None
        env, no_names = dns.failing_lookups(Path(folder), kept_on.code if kept_on else "")
        authority = Authority(Path(folder) / "certificates") if given.guarded else None
        tls = authority.client() if authority else None
        troupe = FaultyFleet(given.seed, no_names, authority)
        troupe.disk = kept_on
        await troupe.start()
        port, admin = free_port(), free_port()
        fleet = Path(folder) / "fleet.yaml"
        batches = Path(folder) / "batches" if given.guarded else None
        fleet.write_text(
            troupe.fleet(
                listen=port,
                admin=admin,
                processes=given.processes,
                tenants=given.tenants,
                batches=batches,
            )
        )
        router = Router(fleet, port, env, tls)
        await router.start()
        modules = "compiled" if locate.in_use() else "plain"
        print(f"seed {given.seed}, {given.processes} processes, {modules} modules")
        seconds = given.minutes * 60
        crowd = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.soak", "--clients-of", str(port),
            "--clients", str(given.clients), "--seed", str(given.seed),
            "--minutes", str(given.minutes), *(["--tenants"] if given.tenants else []),
            *(["--ca", str(authority.ca_file)] if authority else []),
            stdout=asyncio.subprocess.PIPE, limit=1 << 22,
        )  # fmt: skip
        try:
            return await _watch(given, troupe, router, crowd, seconds)
        finally:
            for process in (crowd, router.process):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
            await troupe.stop()


async def _watch(
    given: argparse.Namespace,
    troupe: FaultyFleet,
    router: Router,
    crowd: asyncio.subprocess.Process,
    seconds: float,
) -> int:
    began = time.monotonic()
    until, half = began + seconds - 2, began + seconds / 2
    dice = random.Random(given.seed)
    last: dict[str, object] = {}

    async def listen() -> None:
        assert crowd.stdout is not None
        async for line in crowd.stdout:
            last.clear()
            last.update(json.loads(line))

    async def befall() -> None:
        while time.monotonic() < until:
            await troupe.inject_fault(dice.random() * 2.0)
            troupe.forget()

    async def kill() -> None:
        while given.kill_router and time.monotonic() + given.kill_router < until:
            await asyncio.sleep(given.kill_router)
            await router.die()

    async def lose() -> None:
        while given.kill_member and time.monotonic() + given.kill_member < half:
            await asyncio.sleep(given.kill_member)
            router.lose(dice)
            held.clear()

    async def still() -> None:
        while given.stall_member and time.monotonic() + given.stall_member < until:
            await asyncio.sleep(given.stall_member)
            await router.stand_still(dice)

    async def rows() -> None:
        print("".join(f"{name:>{WIDTH}}" for name in COLUMNS))
        while time.monotonic() < until:
            await asyncio.sleep(min(ROW_S, max(until - time.monotonic(), 0.1)))
            with suppress(aiohttp.ClientError, OSError):
                holds, flying = router.holds(), await in_flight(router.port, router.tls)
                row((time.monotonic() - began) / 60, last, *holds, flying)
                if time.monotonic() > router.young_until:
                    held.append(holds)

    async def batches() -> None:
        while router.tls is not None and time.monotonic() < until:
            nights.append(await night(router, given.seed + len(nights)))

    held: list[tuple[float, int]] = []
    nights: list[str] = []
    await asyncio.gather(listen(), befall(), befall(), kill(), lose(), still(), batches(), rows())
    await crowd.wait()
    return await _verdict(troupe, router, last, held, nights)


def row(minute: float, said: dict[str, object], rss: float, files: int, flying: float) -> None:
    """Print a line of the table."""
    outcomes: Counter[str] = Counter(said.get("outcomes"))  # type: ignore[arg-type]
    wrong = outcomes["wrong"] + outcomes["hangs"]
    figures = (
        f"{minute:.1f}", said.get("sent"), outcomes["whole"], outcomes["refused"], outcomes["torn"],
        outcomes[LEFT], outcomes[NO_ROUTER], wrong, f"{said.get('slowest', 0):.1f}", f"{rss:.0f}",
        files, f"{flying:.0f}",
    )  # fmt: skip
    print("".join(f"{figure!s:>{WIDTH}}" for figure in figures), flush=True)


def grown(held: list[tuple[float, int]], last: tuple[float, int]) -> list[str]:
    """Say what has grown since the first look, by more than a busy moment explains."""
    if len(held) < 2:  # too short to tell
        return []
    (rss, files), (last_rss, last_files) = held[0], last
    found = []
    if last_rss > rss * MORE_MEMORY:
        found.append(f"memory: {rss:.0f} MiB at first, {last_rss:.0f} at the end")
    if last_files > files + MORE_FILES:
        found.append(f"files: {files} at first, {last_files} at the end")
    return found


async def _verdict(
    troupe: FaultyFleet,
    router: Router,
    said: dict[str, object],
    held: list[tuple[float, int]],
    nights: list[str],
) -> int:
    """Look at what is left once all is calm."""
    flying = await calm(router.port, router.tls)
    rss, files = router.holds()
    status = await router.stop()
    log = (router.fleet.parent / "router.log").read_text()
    traces = log.count("Traceback")
    wrong = [*(said.get("wrong") or ()), *filter(None, nights)]  # type: ignore[misc]
    print(f"left in flight {flying:.0f}, rss {rss:.0f} MiB, files {files}, exit status {status}")
    print(f"what befell the workers: {troupe.injected}")
    spells = log.count(dns.LOOKUP_FAILED_LINE)
    print(f"names that could not be looked up, as the router saw it: {spells} spells")
    if nights:
        full = log.count(disk.FULL_DISK_LINE)
        print(f"{len(nights)} files of requests were run; without room they paused {full} times")
    if router.lost:
        print(f"of the router's processes {router.lost} were killed")
    if router.stills:
        print(f"of the router's processes one stood still {router.stills} times")
    # Who comes after one that is killed is younger.
    more = grown(held, (rss, files)) if not router.kills else []
    print(f"grown: {more}, looked at {len(held)} times")
    if router.kills:
        worst = max(router.recovered_s)
        print(f"the router was killed {router.kills} times, and served again within {worst:.1f} s")
    print(f"tracebacks in its log: {traces}; faults the workers found: {troupe.faults()[:5]}")
    print(f"wrong or without end: {wrong}")
    if traces:
        print(log[log.index("Traceback") :][:3000])
    # A killed router forgets its blocks.
    faults = troupe.faults() if not (router.kills or router.lost) else []
    return 1 if flying > 0 or wrong or traces or status or faults or more else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Be one process or the other."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--clients", type=int, default=24)
    options.add_argument("--kill-router", type=float, default=0.0, help="every so many seconds")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--tenants", action="store_true")
    options.add_argument("--kill-member", type=float, default=0.0, help="every so many seconds")
    options.add_argument("--stall-member", type=float, default=0.0, help="every so many seconds")
    options.add_argument("--guarded", action="store_true", help="and with `--tenants`")
    options.add_argument("--clients-of", type=int, help=argparse.SUPPRESS)
    options.add_argument("--ca", help=argparse.SUPPRESS)
    given = options.parse_args(argv)
    if given.kill_member and 2 * given.kill_member >= 60 * given.minutes:
        options.error("--kill-member: none would be killed in the first half of --minutes")
    given.tenants |= given.guarded
    if given.clients_of:
        asyncio.run(clients(given))
        return 0
    return asyncio.run(soak(given))


if __name__ == "__main__":
    raise SystemExit(main())

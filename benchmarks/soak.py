"""Run a router under load while faults are injected into its workers.

    python -m benchmarks.soak --minutes 30 --seed 1 --kill-router 120

The router and the clients are separate processes; this process runs fake workers. Options:

- `--kill-router 120`: kill and restart the router every 120 seconds.
- `--processes 2 --kill-member 60`: kill one every 60 s in the first half; the second shows growth.
- `--stall-member 60`: stop one router process for some seconds every 60 seconds.
- `--tenants`: send the requests of two tenants.
- `--guarded`: use TLS to clients and one worker, refuse some requests for their wait, and run
  batches of a third tenant on a disk that fills up.
- `--seed`: choose the faults.

Compiled modules are used if there are any; VLLM_SCHED_COMPILED=0 selects the plain ones. Each
minute prints the outcomes of requests, the router's load, its memory and its open files. The exit
status is 1 if a request hung or had a wrong answer, a batch line had no or two results, something
stayed in flight, or memory or open files grew.
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
from tests.faults.clients import LEFT, NO_ROUTER, REFUSED, TORN, WHOLE, ClientLoad
from tests.faults.faulty_fleet import KEYS, FaultyFleet
from tests.proxy.certificates import Authority
from vllm_sched.workers.launch import free_port

T = TypeVar("T")

ROW_INTERVAL_S, READY_TIMEOUT_S, DRAIN_TIMEOUT_S = 60.0, 60.0, 60.0
GROWTH_S = ROW_INTERVAL_S / 2  # until the memory of a new process is representative
BATCH_TIMEOUT_S = 300.0  # a line that failed is retried after up to a minute
STALL_S = (1.0, 8.0)  # the router kills a process that stalls for 30 s
COLUMN_WIDTH = 10
COLUMNS = (
    "minute", "sent", "complete", "refused", "cut off", "cancelled", "no router", "wrong",
    "slowest", "rss MiB", "files", "in flight",
)  # fmt: skip
# Metrics that are zero in an idle router.
IN_FLIGHT_METRICS = (
    "proxy_worker_inflight_requests{",
    "proxy_queue_requests ",
    "proxy_queue_bytes ",
    "proxy_client_connections ",
    "proxy_tenant_inflight_requests{",
)
MAX_MEMORY_RATIO, MAX_MORE_FILES = 1.15, 16
INSUFFICIENT_STORAGE = 507


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(each) for task in tasks for each in (task / "children").read_text().split()]
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


async def run_clients(given: argparse.Namespace) -> None:
    """Run the clients, and print the outcomes of their requests each second."""
    keys = tuple(KEYS.values()) if given.tenants else ()
    tls = ssl.create_default_context(cafile=given.ca) if given.ca else None
    load = ClientLoad(given.clients_of, given.seed, keys=keys, tls=tls)
    until = time.monotonic() + given.minutes * 60 - 5
    is_over = lambda: time.monotonic() > until  # noqa: E731

    def report() -> None:
        counts = {"sent": load.sent, "slowest": load.slowest_s, "wrong": load.wrong[:20]}
        tables = {"outcomes": load.outcomes, "statuses": load.statuses}
        print(json.dumps(counts | tables), flush=True)

    async def report_each_second() -> None:
        while not is_over():
            report()
            await asyncio.sleep(1.0)

    plays = (load.play(number, is_over) for number in range(given.clients))
    await asyncio.gather(report_each_second(), *plays)
    report()


async def run_batch(url: str, seed: int, tls: ssl.SSLContext | bool, *statuses: int) -> str:
    """Run a batch; return what is wrong with its results. Requests with `statuses` are repeated."""
    batch = BatchRun(url, seed, tls)
    try:
        async with asyncio.timeout(BATCH_TIMEOUT_S):
            await retry(batch.begin, *statuses)
            while not await retry(batch.is_done, *statuses):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            await retry(batch.judge, *statuses)
    except (AssertionError, openai.APIStatusError) as error:
        return repr(error)[:500]
    except TimeoutError:
        return f"a batch did not end within {BATCH_TIMEOUT_S:g} s"
    finally:
        await batch.close()
    return ""


async def retry(call: Callable[[], Awaitable[T]], *statuses: int) -> T:
    """Return what a call returns, once the router is up and its disk has room."""
    while True:
        try:
            return await call()
        except openai.APIConnectionError:
            await asyncio.sleep(0.2)
        except openai.InternalServerError as error:
            if error.status_code not in (INSUFFICIENT_STORAGE, *statuses):
                raise
            await asyncio.sleep(0.2)


async def soak(given: argparse.Namespace) -> int:
    """Run router, clients and faults, print the table and return the exit status."""
    # Workers with TLS may write to a router that disconnected in the same loop iteration.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        batch_disk = disk.ProcessDisk(Path(folder)) if given.guarded else None
        env, lookup_fault = dns.failing_lookups(Path(folder), batch_disk.code if batch_disk else "")
        authority = Authority(Path(folder) / "certificates") if given.guarded else None
        tls = authority.client() if authority else None
        workers = FaultyFleet(given.seed, lookup_fault, authority)
        workers.disk = batch_disk
        await workers.start()
        port, admin = free_port(), free_port()
        fleet = Path(folder) / "fleet.yaml"
        batches = Path(folder) / "batches" if given.guarded else None
        fleet.write_text(
            workers.fleet(
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
        clients = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.soak", "--clients-of", str(port),
            "--clients", str(given.clients), "--seed", str(given.seed),
            "--minutes", str(given.minutes), *(["--tenants"] if given.tenants else []),
            *(["--ca", str(authority.ca_file)] if authority else []),
            stdout=asyncio.subprocess.PIPE, limit=1 << 22,
        )  # fmt: skip
        try:
            return await _run(given, workers, router, clients, seconds)
        finally:
            for process in (clients, router.process):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
            await workers.stop()


async def _run(
    given: argparse.Namespace,
    workers: FaultyFleet,
    router: Router,
    clients: asyncio.subprocess.Process,
    seconds: float,
) -> int:
    started = time.monotonic()
    until, half = started + seconds - 2, started + seconds / 2
    rng = random.Random(given.seed)
    counts: dict[str, object] = {}

    async def read_clients() -> None:
        assert clients.stdout is not None
        async for line in clients.stdout:
            counts.clear()
            counts.update(json.loads(line))

    async def inject_faults() -> None:
        while time.monotonic() < until:
            await workers.inject_fault(rng.random() * 2.0)
            workers.forget()

    async def kill_router() -> None:
        while given.kill_router and time.monotonic() + given.kill_router < until:
            await asyncio.sleep(given.kill_router)
            await router.restart()

    async def kill_members() -> None:
        while given.kill_member and time.monotonic() + given.kill_member < half:
            await asyncio.sleep(given.kill_member)
            router.kill_member(rng)
            usages.clear()

    async def stall_members() -> None:
        while given.stall_member and time.monotonic() + given.stall_member < until:
            await asyncio.sleep(given.stall_member)
            await router.stall_member(rng)

    async def print_rows() -> None:
        print("".join(f"{name:>{COLUMN_WIDTH}}" for name in COLUMNS))
        while time.monotonic() < until:
            await asyncio.sleep(min(ROW_INTERVAL_S, max(until - time.monotonic(), 0.1)))
            with suppress(aiohttp.ClientError, OSError):
                usage, load = router.usage(), await in_flight(router.port, router.tls)
                print_row((time.monotonic() - started) / 60, counts, *usage, load)
                if time.monotonic() > router.growing_until:
                    usages.append(usage)

    async def run_batches() -> None:
        while (tls := router.tls) is not None and time.monotonic() < until:
            url = url_of(router.port, tls)
            batches.append(await run_batch(url, given.seed + len(batches), tls))

    usages: list[tuple[float, int]] = []
    batches: list[str] = []
    await asyncio.gather(
        read_clients(), inject_faults(), inject_faults(), kill_router(), kill_members(),
        stall_members(), run_batches(), print_rows(),
    )  # fmt: skip
    await clients.wait()
    return await _judge(workers, router, counts, usages, batches)


def print_row(
    minute: float, counts: dict[str, object], rss: float, files: int, load: float
) -> None:
    outcomes: Counter[str] = Counter(counts.get("outcomes"))  # type: ignore[arg-type]
    wrong = outcomes["wrong"] + outcomes["hangs"]
    figures = (
        f"{minute:.1f}", counts.get("sent"), outcomes[WHOLE], outcomes[REFUSED], outcomes[TORN],
        outcomes[LEFT], outcomes[NO_ROUTER], wrong, f"{counts.get('slowest', 0):.1f}",
        f"{rss:.0f}", files, f"{load:.0f}",
    )  # fmt: skip
    print("".join(f"{figure!s:>{COLUMN_WIDTH}}" for figure in figures), flush=True)


def growth(usages: list[tuple[float, int]], last: tuple[float, int]) -> list[str]:
    """Return which of memory and open files grew beyond normal variation since the first row."""
    if len(usages) < 2:
        return []
    (rss, files), (last_rss, last_files) = usages[0], last
    found = []
    if last_rss > rss * MAX_MEMORY_RATIO:
        found.append(f"memory: {rss:.0f} MiB at first, {last_rss:.0f} at the end")
    if last_files > files + MAX_MORE_FILES:
        found.append(f"files: {files} at first, {last_files} at the end")
    return found


async def _judge(
    workers: FaultyFleet,
    router: Router,
    counts: dict[str, object],
    usages: list[tuple[float, int]],
    batches: list[str],
) -> int:
    """Print a summary once the router is idle; return the exit status."""
    load = await wait_idle(router.port, router.tls)
    rss, files = router.usage()
    status = await router.stop()
    log = (router.fleet.parent / "router.log").read_text()
    traces = log.count("Traceback")
    wrong = [*(counts.get("wrong") or ()), *filter(None, batches)]  # type: ignore[misc]
    print(f"still in flight: {load:.0f}, rss {rss:.0f} MiB, files {files}, exit status {status}")
    print(f"injected faults: {workers.injected}")
    print(f"periods without name resolution in the log: {log.count(dns.LOOKUP_FAILED_LINE)}")
    if batches:
        full = log.count(disk.FULL_DISK_LINE)
        print(f"{len(batches)} batches were run; they paused {full} times for a full disk")
    if router.member_kills:
        print(f"router processes killed: {router.member_kills}")
    if router.stalls:
        print(f"router processes stalled: {router.stalls}")
    # A restarted router has less memory than one that ran all the time.
    grown = growth(usages, (rss, files)) if not router.kills else []
    print(f"grown: {grown}, {len(usages)} samples")
    if router.kills:
        worst = max(router.recovered_s)
        print(f"the router was killed {router.kills} times, and served again within {worst:.1f} s")
    print(f"tracebacks in its log: {traces}; faults the workers found: {workers.faults()[:5]}")
    print(f"wrong or without end: {wrong}")
    if traces:
        print(log[log.index("Traceback") :][:3000])
    # A killed router process forgets the KV blocks that workers hold for it.
    faults = workers.faults() if not (router.kills or router.member_kills) else []
    return 1 if load > 0 or wrong or traces or status or faults or grown else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak, or the clients with --clients-of."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--clients", type=int, default=24)
    options.add_argument("--kill-router", type=float, default=0.0, help="interval in seconds")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--tenants", action="store_true")
    options.add_argument("--kill-member", type=float, default=0.0, help="interval in seconds")
    options.add_argument("--stall-member", type=float, default=0.0, help="interval in seconds")
    options.add_argument("--guarded", action="store_true", help="implies --tenants")
    options.add_argument("--clients-of", type=int, help=argparse.SUPPRESS)
    options.add_argument("--ca", help=argparse.SUPPRESS)
    given = options.parse_args(argv)
    if given.kill_member and 2 * given.kill_member >= 60 * given.minutes:
        options.error("--kill-member: no process would be killed in the first half of --minutes")
    given.tenants |= given.guarded
    if given.clients_of:
        asyncio.run(run_clients(given))
        return 0
    return asyncio.run(soak(given))


if __name__ == "__main__":
    raise SystemExit(main())

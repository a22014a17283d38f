"""The parts of a soak that run at the same time, and the verdict."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress

import aiohttp

from benchmarks.soak.clients import run_batch
from benchmarks.soak.router import Router, in_flight, url_of, wait_idle
from tests.faults import disk, dns
from tests.faults.clients import LEFT, NO_ROUTER, REFUSED, TORN, WHOLE
from tests.faults.faulty_fleet import FaultyFleet

ROW_INTERVAL_S = 60.0
COLUMN_WIDTH = 10
COLUMNS = (
    "minute", "sent", "complete", "refused", "cut off", "cancelled", "no router", "wrong",
    "slowest", "rss MiB", "files", "in flight",
)  # fmt: skip
MAX_MEMORY_RATIO, MAX_MORE_FILES = 1.15, 16


class SoakRun:
    """One soak: its faults, the clients' counts, and what was measured so far."""

    def __init__(
        self,
        args: argparse.Namespace,
        workers: FaultyFleet,
        router: Router,
        clients: asyncio.subprocess.Process,
    ) -> None:
        self.args = args
        self.workers = workers
        self.router = router
        self.clients = clients
        self.started = time.monotonic()
        self.until = self.started + args.minutes * 60 - 2
        self.half = self.started + args.minutes * 30
        self.rng = random.Random(args.seed)
        self.counts: dict[str, object] = {}  # as the clients printed them last
        self.usages: list[tuple[float, int]] = []
        self.batch_errors: list[str] = []  # of each batch, empty if it was right

    async def run(self) -> int:
        """Run all parts until the end, and return the exit status."""
        await asyncio.gather(
            self.read_clients(), self.inject_faults(), self.inject_faults(), self.kill_router(),
            self.kill_members(), self.stall_members(), self.run_batches(), self.print_rows(),
        )  # fmt: skip
        await self.clients.wait()
        return await self.judge()

    async def read_clients(self) -> None:
        assert self.clients.stdout is not None
        async for line in self.clients.stdout:
            self.counts = json.loads(line)

    async def inject_faults(self) -> None:
        while time.monotonic() < self.until:
            await self.workers.inject_fault(self.rng.random() * 2.0)
            self.workers.forget()

    async def kill_router(self) -> None:
        interval_s = self.args.kill_router
        while interval_s and time.monotonic() + interval_s < self.until:
            await asyncio.sleep(interval_s)
            await self.router.restart()

    async def kill_members(self) -> None:
        interval_s = self.args.kill_member
        while interval_s and time.monotonic() + interval_s < self.half:
            await asyncio.sleep(interval_s)
            self.router.kill_member(self.rng)
            self.usages.clear()

    async def stall_members(self) -> None:
        interval_s = self.args.stall_member
        while interval_s and time.monotonic() + interval_s < self.until:
            await asyncio.sleep(interval_s)
            await self.router.stall_member(self.rng)

    async def print_rows(self) -> None:
        print("".join(f"{name:>{COLUMN_WIDTH}}" for name in COLUMNS))
        router = self.router
        while time.monotonic() < self.until:
            await asyncio.sleep(min(ROW_INTERVAL_S, max(self.until - time.monotonic(), 0.1)))
            with suppress(aiohttp.ClientError, OSError):
                usage, load = router.usage(), await in_flight(router.port, router.tls)
                print_row((time.monotonic() - self.started) / 60, self.counts, *usage, load)
                if time.monotonic() > router.growing_until:
                    self.usages.append(usage)

    async def run_batches(self) -> None:
        while (tls := self.router.tls) is not None and time.monotonic() < self.until:
            url, seed = url_of(self.router.port, tls), self.args.seed + len(self.batch_errors)
            self.batch_errors.append(await run_batch(url, seed, tls))

    async def judge(self) -> int:
        """Print a summary once the router is idle; return the exit status."""
        router = self.router
        load = await wait_idle(router.port, router.tls)
        rss, files = router.usage()
        status = await router.stop()
        log = (router.fleet.parent / "router.log").read_text()
        wrong = [*(self.counts.get("wrong") or ()), *filter(None, self.batch_errors)]  # type: ignore[misc]
        # A restarted router has less memory than one that ran all the time.
        grown = [] if router.kills else growth(self.usages, (rss, files))
        print(f"still in flight: {load:.0f}, rss {rss:.0f} MiB, files {files}, status {status}")
        print(f"grown: {grown}, {len(self.usages)} samples")
        print(f"wrong or without end: {wrong}")
        self.print_faults(log)
        if traces := log.count("Traceback"):
            print(f"{traces} tracebacks in the log:\n{log[log.index('Traceback') :][:3000]}")
        # A killed router process forgets the KV blocks that workers hold for it.
        faults = [] if router.kills or router.member_kills else self.workers.faults()
        return 1 if load > 0 or wrong or traces or status or faults or grown else 0

    def print_faults(self, log: str) -> None:
        """Print the injected faults, and what the workers and the log show of them."""
        workers, router = self.workers, self.router
        print(f"injected faults: {workers.injected}; found by workers: {workers.faults()[:5]}")
        print(f"periods without name resolution in the log: {log.count(dns.LOOKUP_FAILED_LINE)}")
        if batches := len(self.batch_errors):
            full = log.count(disk.FULL_DISK_LINE)
            print(f"{batches} batches were run; they paused {full} times for a full disk")
        if router.member_kills:
            print(f"router processes killed: {router.member_kills}")
        if router.stalls:
            print(f"router processes stalled: {router.stalls}")
        if kills := router.kills:
            worst_s = max(router.recovered_s)
            print(f"the router was killed {kills} times, and served again within {worst_s:.1f} s")


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
    lines = []
    if last_rss > rss * MAX_MEMORY_RATIO:
        lines.append(f"memory: {rss:.0f} MiB at first, {last_rss:.0f} at the end")
    if last_files > files + MAX_MORE_FILES:
        lines.append(f"files: {files} at first, {last_files} at the end")
    return lines

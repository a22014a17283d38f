"""Run three routers behind HAProxy under load, and kill routers and their Redis server at random.

    python -m benchmarks.replicas.soak --minutes 30 --seed 1

The routers, HAProxy, Redis and the clients are separate processes; this process runs fake workers.
Faults: all processes of a router are killed, and it is started again; Redis is killed and restarted
empty, or frozen for 10 seconds; PostgreSQL, which has the batches, crashes and is started again.
With --worker-faults, workers fail too.

One tenant always asks for more requests per minute than its limit. The exit status is 1 if a
request had no end or a wrong answer, a batch line had no or two results, that tenant's accepted
requests differ from its limit by more than 5 %, a worker had more requests than its limit and one
per other router, or a router kept something in flight or logged a traceback. A router that starts
without Redis knows of no other one; worker limits are not judged then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path

from benchmarks.soak.clients import run_batch
from benchmarks.soak.router import IN_FLIGHT_METRICS, Router, children_of, wait_idle
from benchmarks.soak.run import COLUMN_WIDTH
from tests.faults import clients, faulty_fleet
from tests.faults.faulty_fleet import METERED_KEY, METERED_PER_MINUTE, FaultyFleet
from tests.haproxy import HAProxy
from tests.proxy.batches.postgres import PostgresServer
from tests.proxy.processes.router_group import samples
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.raw_client import Client, bearer, chat
from tests.redis_server import RedisServer
from vllm_sched.workers.launch import free_port

ROUTERS, MAX_REQUESTS = 3, 4
ROW_INTERVAL_S, PACE_S = 60.0, 0.02
CALM_S = (5.0, 15.0)  # between two faults of Redis
RUN_S = (10.0, 30.0)  # between two kills of a router
EMPTY_S, FREEZE_S = (0.0, 5.0), 10.0
REPEATED = 500, 502, 503, 504  # statuses of requests about batches
CONNECTIONS, ASKED_PER_S = 8, 25.0  # of the tenant with a limit, which has 10 a second
SLOW_S = 0.4  # longest time of a worker until its response
LOST_S = 0.02  # until a worker notices that a router has closed a connection
WITH, WITHOUT = "with Redis", "without"
JOINED_S = 4.0  # until running requests were placed with Redis
MAX_ERROR = 0.05
COLUMNS = (
    "minute", "sent", "complete", "refused", "cut off", "cancelled", "no end", "wrong", "slowest",
    "accepted", "error %", "kills", "redis",
)  # fmt: skip


class CountedFleet(FaultyFleet):
    """Workers that count the requests above their limit."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kv.slow_s = SLOW_S
        self.requests = 0  # to workers with a limit
        self.above: dict[str, dict[str, Counter[int]]] = {}  # arrivals by number above the limit
        self.calm_at = 0.0

    @property
    def phase(self) -> str:
        return WITH if time.monotonic() >= self.calm_at else WITHOUT

    def observed(self, fake: FakeWorker, script: Script) -> Script:
        if fake.name not in faulty_fleet.ROLES:
            return script
        running: set[Call] = set()
        above = self.above[fake.name] = {phase: Counter() for phase in (WITH, WITHOUT)}

        def count(arrived: frozenset[Call]) -> None:
            if (more := len(in_flight(arrived)) - MAX_REQUESTS) > 0:
                above[self.phase][more] += 1

        async def run(call: Call) -> None:
            self.requests += 1
            running.add(call)
            if len(now := in_flight(running)) > MAX_REQUESTS:
                asyncio.get_running_loop().call_later(LOST_S, count, now)
            try:
                await script(call)
            finally:
                running.discard(call)

        return run


def in_flight(calls: set[Call] | frozenset[Call]) -> frozenset[Call]:
    return frozenset(call for call in calls if not call.lost.is_set())


async def unfinished(port: int) -> dict[str, float]:
    """Wait until a router is idle; return its metrics that are not zero after the timeout."""
    if await wait_idle(port) <= 0:
        return {}
    client = await Client.connect(port)
    counts = await samples(client)
    client.close()
    return {name: n for name, n in counts.items() if n and name.startswith(IN_FLIGHT_METRICS)}


class MeteredLoad:
    """The tenant that asks for more than its requests per minute."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._since = self._asked_at = time.monotonic()
        self.statuses: Counter[int] = Counter()
        self.cut_off = self.no_end = 0

    async def run(self, until: float) -> None:
        plays = (self._play(number, until) for number in range(CONNECTIONS))
        await asyncio.gather(*plays)

    async def _play(self, number: int, until: float) -> None:
        client: Client | None = None
        interval_s = CONNECTIONS / ASKED_PER_S
        due = time.monotonic() + number / ASKED_PER_S
        while due < until:
            await asyncio.sleep(due - time.monotonic())
            self._asked_at = time.monotonic()
            due = max(due + interval_s, self._asked_at)
            try:
                if client is None:
                    client = await Client.connect(self._port)
                request = chat(f"{number}", bearer(METERED_KEY))
                answer = await client.ask(request, within=clients.MAX_ANSWER_S)
            except (TimeoutError, *clients.DISCONNECTED) as error:
                if isinstance(error, TimeoutError):
                    self.no_end += 1
                else:
                    self.cut_off += 1
                if client is not None:
                    client.close()
                client = None
                continue
            self.statuses[answer.status] += 1
        if client is not None:
            client.close()

    @property
    def accepted(self) -> int:
        """The requests that were not refused for the limit; the others failed later."""
        return self.cut_off + sum(self.statuses.values()) - self.statuses[429]

    def error(self) -> float:
        """Return the relative difference from the limit; the bucket is full at the start."""
        minutes = (self._asked_at - self._since) / 60
        return self.accepted / (METERED_PER_MINUTE * (minutes + 1)) - 1


class ReplicaSoak:
    """The processes of a run, and what they did."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        self.redis = RedisServer(folder)
        self.postgres = PostgresServer()
        self.workers = CountedFleet(args.seed)
        self.folder = folder
        self.routers: list[Router] = []
        self.front: HAProxy | None = None
        self.clients: asyncio.subprocess.Process | None = None
        self.counts: dict[str, object] = {}
        self.redis_faults: Counter[str] = Counter()
        self.postgres_faults = 0
        self.batches: list[str] = []  # what was wrong with each

    async def start(self) -> HAProxy:
        await self.workers.start()
        more = (
            f"  shared: {{url: '{self.redis.url}', replicas: {ROUTERS}}}\n"
            f"  batches: {{database: '{self.postgres.new_database()}', concurrency: 2}}\n"
        )
        for number in range(ROUTERS):
            folder = self.folder / f"router-{number}"
            folder.mkdir()
            fleet, port = folder / "fleet.yaml", free_port()
            fleet.write_text(
                self.workers.fleet(
                    listen=port, admin=free_port(), tenants=True, max_requests=MAX_REQUESTS,
                    more=more,
                )
            )  # fmt: skip
            self.routers.append(Router(fleet, port, dict(os.environ), None))
        await asyncio.gather(*(router.start() for router in self.routers))
        self.front = HAProxy(self.folder, [router.port for router in self.routers])
        return self.front

    async def stop(self) -> None:
        for process in (self.clients, *(router.process for router in self.routers)):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        if self.front is not None:
            self.front.close()
        self.redis.close()
        self.postgres.close()
        await self.workers.stop()

    async def run(self) -> int:
        front = await self.start()
        args, seconds = self.args, self.args.minutes * 60
        self.clients = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.soak", "--clients-of", str(front.port),
            "--clients", str(args.clients), "--seed", str(args.seed),
            "--minutes", str(args.minutes), "--tenants",
            stdout=asyncio.subprocess.PIPE, limit=1 << 22,
        )  # fmt: skip
        started = time.monotonic()
        until = started + seconds - 2
        load = MeteredLoad(front.port)
        await asyncio.gather(
            self._read_clients(), load.run(until), self._fail_redis(until),
            self._fail_postgres(until), self._run_batches(front.port, until),
            self._kill_routers(until), self._fail_workers(until), self._print_rows(load, until),
        )  # fmt: skip
        await self.clients.wait()
        front.close()
        return await self._judge(load)

    async def _read_clients(self) -> None:
        assert self.clients is not None
        assert self.clients.stdout is not None
        async for line in self.clients.stdout:
            self.counts = json.loads(line)

    # Faults

    async def _fail_redis(self, until: float) -> None:
        while time.monotonic() + CALM_S[1] + FREEZE_S < until:
            await asyncio.sleep(self.rng.uniform(*CALM_S))
            self.workers.calm_at = inf
            if self.rng.random() < 0.5:
                self.redis_faults["restarted empty"] += 1
                self.redis.kill()
                await asyncio.sleep(self.rng.uniform(*EMPTY_S))
                await asyncio.to_thread(self.redis.start)
            else:
                self.redis_faults["frozen"] += 1
                self.redis.freeze()
                await asyncio.sleep(FREEZE_S)
                self.redis.thaw()
            self.workers.calm_at = time.monotonic() + JOINED_S

    async def _kill_routers(self, until: float) -> None:
        while time.monotonic() + RUN_S[1] < until:
            await asyncio.sleep(self.rng.uniform(*RUN_S))
            router = self.rng.choice(self.routers)
            assert router.process is not None
            for pid in children_of(router.process.pid):
                os.kill(pid, signal.SIGKILL)
            await router.restart()

    async def _fail_postgres(self, until: float) -> None:
        while time.monotonic() + RUN_S[1] < until:
            await asyncio.sleep(self.rng.uniform(*RUN_S))
            self.postgres_faults += 1
            await asyncio.to_thread(self.postgres.stop)
            await asyncio.sleep(self.rng.uniform(*EMPTY_S))
            await asyncio.to_thread(self.postgres.start)

    async def _run_batches(self, port: int, until: float) -> None:
        while time.monotonic() < until:
            seed = self.args.seed + len(self.batches)
            url = f"http://127.0.0.1:{port}"
            self.batches.append(await run_batch(url, seed, False, *REPEATED))

    async def _fail_workers(self, until: float) -> None:
        while time.monotonic() < until:
            if self.args.worker_faults:
                await self.workers.inject_fault(self.rng.random() * 2.0)
                self.workers.kv.slow_s = SLOW_S
            else:
                await asyncio.sleep(1.0)
            self.workers.forget()

    # Results

    async def _print_rows(self, load: MeteredLoad, until: float) -> None:
        print("".join(f"{name:>{COLUMN_WIDTH}}" for name in COLUMNS))
        started = time.monotonic()
        while (now := time.monotonic()) < until:
            await asyncio.sleep(min(ROW_INTERVAL_S, max(until - now, 0.1)))
            outcomes: Counter[str] = Counter(self.counts.get("outcomes"))  # type: ignore[arg-type]
            figures = (
                f"{(time.monotonic() - started) / 60:.1f}", self.counts.get("sent"),
                outcomes[clients.WHOLE], outcomes[clients.REFUSED], outcomes[clients.TORN],
                outcomes[clients.LEFT], outcomes["hangs"] + load.no_end, outcomes["wrong"],
                f"{self.counts.get('slowest', 0):.1f}", load.accepted, f"{load.error():.1%}",
                self.kills, self.redis_faults.total(),
            )  # fmt: skip
            print("".join(f"{figure!s:>{COLUMN_WIDTH}}" for figure in figures), flush=True)

    @property
    def kills(self) -> int:
        return sum(router.kills for router in self.routers)

    async def _judge(self, load: MeteredLoad) -> int:
        """Print a summary once the routers are idle; return the exit status."""
        error = load.error()
        left = [await unfinished(router.port) for router in self.routers]
        exits = [await router.stop() for router in self.routers]
        logs = [(router.fleet.parent / "router.log").read_text() for router in self.routers]
        traces = [log[log.index("Traceback") :][:3000] for log in logs if "Traceback" in log]
        wrong = [*(self.counts.get("wrong") or ()), *filter(None, self.batches)]  # type: ignore[misc]
        no_end = self.counts["outcomes"].get("hangs", 0) + load.no_end  # type: ignore[attr-defined]
        recovered = [s for router in self.routers for s in router.recovered_s]
        above = [numbers for of in self.workers.above.values() for numbers in of.values()]
        worst = max((number for numbers in above for number in numbers), default=0)
        print(f"requests without an end: {no_end}; wrong: {wrong}; {self.counts['statuses']}")
        print(
            f"limit of {METERED_PER_MINUTE} requests per minute: {load.accepted} accepted, "
            f"{error:+.1%}; statuses {dict(load.statuses)}, {load.cut_off} cut off"
        )
        print(f"arrivals above a worker's limit of {MAX_REQUESTS}, of {self.workers.requests}:")
        for name, numbers in self.workers.above.items():
            by_phase = (f"{phase} {dict(sorted(part.items()))}" for phase, part in numbers.items())
            print(f"  {name}: {'; '.join(by_phase)}")
        longest_s = max(recovered, default=0.0)
        print(f"routers killed: {self.kills}, ready again in at most {longest_s:.1f} s")
        print(f"{len(self.batches)} batches; PostgreSQL restarted {self.postgres_faults} times")
        print(f"Redis: {dict(self.redis_faults)}; workers: {self.workers.injected}")
        print(f"still in flight: {left}, exit statuses {exits}, tracebacks {len(traces)}")
        for trace in traces:
            print(trace)
        missed = {
            "requests without an end": bool(no_end or wrong),
            "requests per minute": abs(error) > MAX_ERROR,
            "requests of a worker": worst >= ROUTERS,
            "in flight": any(left) or any(exits) or bool(traces),
        }
        print(f"missed: {[name for name, is_missed in missed.items() if is_missed]}")
        return int(any(missed.values()))


async def soak(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        run = ReplicaSoak(args, Path(folder))
        try:
            return await run.run()
        finally:
            await run.stop()


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas.soak", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--worker-faults", action="store_true")
    return asyncio.run(soak(options.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())

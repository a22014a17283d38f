"""Measure what more router processes gain: requests/s, and processor time per request.

    python -m benchmarks.processes
    python -m benchmarks.processes --processes 1 2 4 --rounds 9 --connections 128

Load, mock workers and routers run on this machine. With enough processors each process of a router,
source of load and mock worker has its own, and requests/s are comparable. Otherwise routers share
processors, and only processor time is comparable: it gives the requests/s with one processor each,
without the cost of shared caches and memory. With `--apart` each process of a router has its own
processor, shared only with load and mock workers.

    python -m benchmarks.processes load PORT SECONDS CONNECTIONS SEED      one source of load
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.router import mock, processes
from benchmarks.router.load import HOST, closed_loop
from benchmarks.router.prompts import Prompts
from benchmarks.router.stage import process, router_process
from vllm_sched.workers.launch import Worker, free_port

WARM_UP_S = 0.5
BODY_BYTES = 1024
MICRO = 1e6


@dataclass(frozen=True)
class Cpus:
    """CPU affinities."""

    routers: frozenset[int]
    others: frozenset[int]
    enough: bool  # one for each process
    apart: bool = False  # a router's processes run on different CPUs

    @classmethod
    def here(cls, most: int, *, apart: bool = False) -> Cpus:
        """Divide this process's CPUs between routers and others."""
        cpus = sorted(os.sched_getaffinity(0))
        if apart:
            return cls(frozenset(cpus), frozenset(cpus), enough=False, apart=True)
        if len(cpus) >= 3 * most:
            return cls(frozenset(cpus[-most:]), frozenset(cpus[:-most]), enough=True)
        if len(cpus) == 1:
            return cls(frozenset(cpus), frozenset(cpus), enough=False)
        return cls(frozenset(cpus[-1:]), frozenset(cpus[:-1]), enough=False)


@dataclass(frozen=True)
class Sample:
    per_s: float
    cpu_us: float  # per request, of all processes and their supervisor
    errors: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print all figures; return 1 if a request failed."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["load"]:
        port, seconds, connections, seed = words[1:]
        print(json.dumps(uvloop.run(load(int(port), float(seconds), int(connections), int(seed)))))
        return 0
    parser = argparse.ArgumentParser(prog="processes", description="gain of more router processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="per window")
    parser.add_argument("--connections", type=int, default=32, help="per process")
    parser.add_argument("--apart", action="store_true", help="one router process per processor")
    args = parser.parse_args(words)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    most = max(args.processes)
    cpus = Cpus.here(most, apart=args.apart)
    sources = most if cpus.enough else 1
    load_average = os.getloadavg()[0]
    samples: dict[int, list[Sample]] = {count: [] for count in args.processes}
    with stage(args.processes, cpus, workers=max(most, 2)) as routers:
        for number in range(args.rounds):
            order = args.processes if number % 2 else args.processes[::-1]
            for count in order:
                samples[count].append(
                    measure(
                        routers[count],
                        args.seconds,
                        args.connections * count,
                        sources,
                        cpus,
                        number,
                    )
                )
    report(samples, cpus, load_average)
    return int(any(sample.errors for of_count in samples.values() for sample in of_count))


@contextmanager
def stage(counts: Sequence[int], cpus: Cpus, workers: int) -> Iterator[dict[int, Worker]]:
    """Start mock workers, and a router with each number of processes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(workers)]
        routers: dict[int, Worker] = {}
        with processes.running_on(cpus.others):
            for port in ports:
                stack.enter_context(mock_worker(port))
        with processes.running_on(cpus.routers):
            for count in counts:
                routers[count] = router = make_router(folder, ports, count)
                stack.callback(router.stop)
                router.start()
        for router in routers.values():
            router.wait_ready()
            if cpus.apart:
                set_affinity(router, sorted(cpus.routers))
        time.sleep(1.5)  # until workers are probed
        yield routers


@contextmanager
def mock_worker(port: int) -> Iterator[None]:
    command = [sys.executable, mock.__file__, str(port)]
    worker = process("mock", command, port)
    try:
        worker.start()
        worker.wait_ready()
        yield
    finally:
        worker.stop()


def set_affinity(router: Worker, cpus: Sequence[int]) -> None:
    """Give each serving process of a router one of the CPUs."""
    assert router.pid is not None
    supervisor, *serving = processes.tree(router.pid)
    for number, pid in enumerate(serving or [supervisor]):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cpus[-1 - number % len(cpus)]})


def make_router(folder: Path, workers: Sequence[int], count: int) -> Worker:
    """Return a router with `count` processes, as users start it."""
    fleet = {
        "model": mock.MODEL,
        "workers": [
            {"name": f"w{number}", "url": f"http://{HOST}:{worker}"}
            for number, worker in enumerate(workers)
        ],
        "router": {"processes": count},
    }
    return router_process(f"router of {count}", folder / f"{count}.yaml", fleet)


def measure(
    router: Worker, seconds: float, connections: int, sources: int, cpus: Cpus, seed: int
) -> Sample:
    """Run the sources of load and return the sample."""
    assert router.pid is not None
    pids = processes.tree(router.pid)
    per_source = str(connections // sources)
    with processes.running_on(cpus.others):
        loads = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.processes",
                    *(
                        "load",
                        str(router.port),
                        str(seconds),
                        per_source,
                        str(seed * sources + number),
                    ),
                ],
                stdout=subprocess.PIPE,
            )
            for number in range(sources)
        ]
    before = processes.cpu_seconds(pids)
    results = [json.loads(load.communicate()[0]) for load in loads]
    used = processes.cpu_seconds(pids) - before
    requests = sum(result["all"] for result in results)
    return Sample(
        sum(result["per_s"] for result in results),
        used / requests * MICRO if requests else float("nan"),
        sum(result["errors"] for result in results),
    )


async def load(port: int, seconds: float, connections: int, seed: int) -> dict[str, float]:
    """Run a closed loop; only the rate leaves out warm-up and end."""
    async with closed_loop(port, Prompts(BODY_BYTES, seed=seed), connections) as clients:
        await asyncio.sleep(WARM_UP_S)
        first, since = clients.tally.done, time.perf_counter()
        await asyncio.sleep(seconds)
        per_s = (clients.tally.done - first) / (time.perf_counter() - since)
    return {"per_s": per_s, "all": clients.tally.done, "errors": clients.errors.total()}


def report(samples: dict[int, list[Sample]], cpus: Cpus, load_average: float) -> None:
    """Print medians and the gain of each number of processes."""
    print(
        f"routers on CPU {sorted(cpus.routers)}{', one process each' if cpus.apart else ''}, "
        f"load and mock workers on {sorted(cpus.others)}; load average before: {load_average:.1f}"
    )
    alone = min(samples)
    base = median(sample.cpu_us for sample in samples[alone])
    rate = median(sample.per_s for sample in samples[alone])
    for count, of_count in samples.items():
        per_s = median(sample.per_s for sample in of_count)
        cpu_us = median(sample.cpu_us for sample in of_count)
        errors = sum(sample.errors for sample in of_count)
        potential = count / alone * base / cpu_us
        line = f"{count} process{'es' if count > 1 else ''}: {per_s:8,.0f} requests/s"
        line += f", {cpu_us:6.1f} us of processor time each"
        if count != alone:
            if cpus.enough:
                line += f"; {per_s / rate:.2f}x"
            line += f"; with a processor each, by processor time: {potential:.2f}x"
        if errors:
            line += f"; {errors} ERRORS"
        print(line)


if __name__ == "__main__":
    sys.exit(main())

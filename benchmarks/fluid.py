"""What a request costs in a simulated fleet of plain workers, and how that grows.

    python -m benchmarks.fluid                     # 1,000 workers, 1,000,000 requests
    python -m benchmarks.fluid --requests 50000    # the same fleet, sooner

First fleets of growing size with requests in proportion: what one costs by the number of workers.
Then the whole. CPU time of this process, and the most memory that it ever had. At the beginning
each of a worker's first answers is lent to all workers that have none, which costs the square of
their number, once; the cost of a request is that of those after.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

from proxy.core.model.role import Role
from proxy.core.router import RouterSettings
from vllm_sched.bench.results.goodput import parse
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.aggregate_flow import AggregateFlow, FlowResult, PlacedWorker
from vllm_sched.sim.fleet.models import of_profile

SIZES = (4, 16, 64, 256)
WORKLOAD = "azure-conv:0.95,mooncake-conv:0.05"
RATE = 5.0  # a worker
FIRST = 10  # requests a worker, after which each of them is known
LEAST = 4000  # requests: fewer say little
TARGETS = "ttft:3000 tpot:100"


def fleet(workers: int) -> list[PlacedWorker]:
    """Make a fleet of which a quarter is for longs."""
    machine = of_profile("h100-8b")
    placed = []
    for index in range(workers):
        role = Role.LONG if index % 4 == 0 else Role.SHORT
        length = machine.max_model_len if role is Role.LONG else 16_384
        placed.append(PlacedWorker(replace(machine, name=f"w{index}", max_model_len=length), role))
    return placed


def play(workers: int, requests: int, seed: int) -> tuple[FlowResult, float, float]:
    """Play so many requests; the run, CPU seconds, and CPU seconds per request after the first."""
    schedule = Schedule(
        source=find(WORKLOAD),
        rate=RATE * workers,
        count=requests,
        duration_s=2 * requests / (RATE * workers) + 1,
        seed=seed,
    )
    flow = AggregateFlow(fleet(workers), RouterSettings(), parse(TARGETS.split()))
    first = min(FIRST * workers, requests // 2)
    marks: list[float] = []

    def marked() -> Iterator[Request]:
        for number, request in enumerate(schedule):
            if number == first:
                marks.append(time.process_time())
            yield request

    began = time.process_time()
    run = flow.play(marked())
    ended = time.process_time()
    return run, ended - began, (ended - marks[0]) / (requests - first)


def tell(workers: int, run: FlowResult, seconds: float, each: float) -> None:
    """Print a line."""
    print(
        f"{workers:7,} {run.all.arrived:10,} {seconds:9.1f} s {each * 1e6:8.0f} us "
        f"{each * 1e6 / math.log2(workers):7.1f} us {run.all.share:8.1%} "
        f"{run.all.ttft.quantile(0.99):7.2f} s"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="CPU cost of plain workers and the router core")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("workers   requests         CPU  a request   /log2(n)  in time  TTFT p99")
    per_worker = args.requests / args.workers
    for workers in (size for size in SIZES if size < args.workers):
        tell(workers, *play(workers, max(round(per_worker * workers), LEAST), args.seed))
    tell(args.workers, *play(args.workers, args.requests, args.seed))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"most memory: {most:,.0f} MB")


if __name__ == "__main__":
    main()

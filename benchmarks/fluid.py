"""Measure the cost of a request in a simulated fleet of fluid workers.

    python -m benchmarks.fluid                     # 1,000 workers, 1,000,000 requests
    python -m benchmarks.fluid --requests 50000    # the same fleet, sooner

Prints CPU time for fleets of growing size with proportional requests, then for the whole fleet, and
the peak memory. The first answers of each worker are copied to all workers without one, which costs
O(workers^2) once, so the cost per request leaves the first requests out.
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
from vllm_sched.sim.fleet.aggregate_flow import AggregateFlow, PlacedWorker
from vllm_sched.sim.fleet.figures import FlowResult
from vllm_sched.sim.fleet.models import of_profile

SIZES = (4, 16, 64, 256)
WORKLOAD = "azure-conv:0.95,mooncake-conv:0.05"
RATE = 5.0  # requests/s per worker
FIRST = 10  # requests per worker until the router has estimates of all
MIN_REQUESTS = 4000
TARGETS = "ttft:3000 tpot:100"


def fleet(workers: int) -> list[PlacedWorker]:
    """Return a fleet in which a quarter of the workers is for long prompts."""
    machine = of_profile("h100-8b")
    placed = []
    for index in range(workers):
        role = Role.LONG if index % 4 == 0 else Role.SHORT
        length = machine.max_model_len if role is Role.LONG else 16_384
        placed.append(PlacedWorker(replace(machine, name=f"w{index}", max_model_len=length), role))
    return placed


def play(workers: int, requests: int, seed: int) -> tuple[FlowResult, float, float]:
    """Return the result, CPU seconds, and CPU seconds per request after the first ones."""
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

    def requests_with_mark() -> Iterator[Request]:
        for number, request in enumerate(schedule):
            if number == first:
                marks.append(time.process_time())
            yield request

    start = time.process_time()
    run = flow.play(requests_with_mark())
    end = time.process_time()
    return run, end - start, (end - marks[0]) / (requests - first)


def print_row(workers: int, run: FlowResult, seconds: float, request_s: float) -> None:
    print(
        f"{workers:7,} {run.all.arrived:10,} {seconds:9.1f} s {request_s * 1e6:8.0f} us "
        f"{request_s * 1e6 / math.log2(workers):7.1f} us {run.all.share:8.1%} "
        f"{run.all.ttft.quantile(0.99):7.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU cost of fluid workers and the router core")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("workers   requests         CPU  per request /log2(n)  in time  TTFT p99")
    per_worker = args.requests / args.workers
    for workers in (size for size in SIZES if size < args.workers):
        requests = max(round(per_worker * workers), MIN_REQUESTS)
        print_row(workers, *play(workers, requests, args.seed))
    print_row(args.workers, *play(args.workers, args.requests, args.seed))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory: {peak:,.0f} MB")


if __name__ == "__main__":
    main()

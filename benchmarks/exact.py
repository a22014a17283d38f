"""Measure the speed of the exact engine: one worker, 8B on an H100, ten requests a second.

    python -m benchmarks.exact

Prints virtual seconds per second of processor time, and vLLM's scheduler's share of the wall time,
which no simulator that uses this scheduler can save.
"""

from __future__ import annotations

import argparse
import time

from proxy.config import FleetConfig
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.models import of_profile

PROFILE, RATE = "h100-8b", 10.0


def play(workload: str, seconds: float) -> tuple[float, float, int, float]:
    """Return speed, the scheduler's share, requests and mean concurrency."""
    worker = {"name": "w", "profile": PROFILE}
    config = FleetConfig(model="model", workers=[worker])  # type: ignore[list-item]
    model = of_profile(PROFILE)
    fleet = SimulatedFleet(config, {"w": model}, ExactEngine)
    schedule = Schedule(source=find(workload), rate=RATE, duration_s=seconds)
    wall, cpu = time.perf_counter(), time.process_time()
    played = fleet.play(schedule)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    concurrency = sum(outcome.latency for outcome in played.outcomes) / played.duration
    share = played.facts["workers"]["w"]["scheduler_s"] / wall_s
    return played.duration / cpu_s, share, len(played.outcomes), concurrency


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--duration", type=float, default=120.0, help="virtual seconds")
    parser.add_argument("--workload", nargs="+", default=["azure-conv", "azure-code", "1000x100"])
    args = parser.parse_args()
    play("100x10", 5.0)  # imports modules and fills caches
    print("workload | requests | concurrency | virtual s per CPU s | vLLM's scheduler")
    for workload in args.workload:
        speed, share, requests, concurrency = play(workload, args.duration)
        print(f"{workload} | {requests} | {concurrency:.1f} | {speed:.1f} | {share:.0%}")


if __name__ == "__main__":
    main()

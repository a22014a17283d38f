"""How fast are real schedulers played? One worker, 8B on an H100, ten requests a second.

    python -m benchmarks.exact

Prints virtual seconds in one of the processor's, so that little depends on what else a machine has
to do, and the share of real time that is vLLM's own scheduler: the floor below which no simulator
of its decisions can come.
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
    """Play; returns speed, the scheduler's share, requests, and how many ran at once on average."""
    worker = {"name": "w", "profile": PROFILE}
    config = FleetConfig(model="model", workers=[worker])  # type: ignore[list-item]
    model = of_profile(PROFILE)
    fleet = SimulatedFleet(config, {"w": model}, ExactEngine)
    schedule = Schedule(source=find(workload), rate=RATE, duration_s=seconds)
    began, cpu = time.perf_counter(), time.process_time()
    played = fleet.play(schedule)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    under_way = sum(each.latency for each in played.outcomes) / played.duration
    share = played.facts["workers"]["w"]["scheduler_s"] / wall_s
    return played.duration / cpu_s, share, len(played.outcomes), under_way


def main() -> None:
    """Play some workloads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--duration", type=float, default=120.0, help="virtual seconds")
    parser.add_argument("--workload", nargs="+", default=["azure-conv", "azure-code", "1000x100"])
    given = parser.parse_args()
    play("100x10", 5.0)  # what is imported and built once
    print("workload | requests | at once | times as fast as time | vLLM's scheduler")
    for workload in given.workload:
        speed, share, requests, at_once = play(workload, given.duration)
        print(f"{workload} | {requests} | {at_once:.1f} | {speed:.1f} | {share:.0%}")


if __name__ == "__main__":
    main()

"""`vllm-sched demo FLEET.yaml`: what a fleet's pools are worth, on this machine, in minutes."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import yaml

from proxy.config import (
    AdminConfig,
    FleetConfig,
    LaunchConfig,
    RouterConfig,
    RoutingConfig,
    WorkerConfig,
)
from proxy.errors import ConfigError, Problem
from vllm_sched.bench.compare import Comparison, Contender, Narrator, Plan, measure, running
from vllm_sched.bench.workloads import build
from vllm_sched.cli import measure as measuring
from vllm_sched.cli.up import described, placed
from vllm_sched.workers.launch import Worker, free_port, on_cpu

READY_S = 30.0


def add_options(command: argparse.ArgumentParser) -> None:
    """Describe the options."""
    measuring.add_options(command)


def demo(arguments: argparse.Namespace, config: FleetConfig) -> int:
    """Play a load through the fleet as it is written, and through the same workers as one pool."""
    measuring.check(arguments)
    if problems := [
        Problem(f"workers[{index}].launch", "is missing; this command starts all workers itself")
        for index, worker in enumerate(config.workers)
        if worker.launch is None
    ]:
        raise ConfigError(str(arguments.fleet), problems)
    workload = build(arguments.workload, longs=arguments.longs, seed=arguments.seed)
    plan = Plan(config.model, workload, arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="vllm-sched-demo-") as folder:
        play = partial(_play, arguments.fleet.parent, placed(config), plan, Path(folder))
        return measuring.measured(play, arguments)


async def _play(
    beside: Path, config: FleetConfig, plan: Plan, folder: Path, narrator: Narrator
) -> Comparison:
    cpus = own_cpus(len(config.workers))
    workers = [
        described(config, to_play(worker, cpu), beside, folder)
        for worker, cpu in zip(config.workers, cpus, strict=True)
    ]
    pool = one_pool(config)
    sides = (
        Contender("baseline", "one pool, round robin", router_of(pool, folder, "one-pool")),
        Contender(
            "candidate", f"pools, {config.routing.policy}", router_of(config, folder, "pools")
        ),
    )
    async with running(workers, narrator), running([side.worker for side in sides], narrator):
        await measure(sides, plan, narrator)
    return Comparison(plan, *sides)


def to_play(worker: WorkerConfig, cpu: int | None) -> WorkerConfig:
    """Return how a worker is started here: on a processor of its own, without prefix caching.

    Of two routers before the same workers, the second would find its prompts cached.
    """
    told = worker.launch or LaunchConfig()
    cpus = told.cpus or (() if cpu is None else (cpu,))
    args = (*told.args, "--no-enable-prefix-caching")
    launch = told.model_copy(update={"args": args, "cpus": cpus})
    return worker.model_copy(update={"launch": launch})


def own_cpus(workers: int) -> list[int | None]:
    """Give each worker a processor, as if on a machine of its own, where that can be done."""
    offered = sorted(os.sched_getaffinity(0))
    return [*offered[:workers]] if on_cpu() and len(offered) >= workers else [None] * workers


def one_pool(config: FleetConfig) -> FleetConfig:
    """Return the fleet as a plain load balancer would see it: any request to any worker."""
    alike = [
        worker.model_copy(update={"role": "general", "max_model_len": None})
        for worker in config.workers
    ]
    routing = RoutingConfig(policy="round_robin", prefix_affinity=False, tokenize=False)
    return config.model_copy(update={"workers": tuple(alike), "routing": routing})


def router_of(config: FleetConfig, folder: Path, name: str) -> Worker:
    """Describe a router process for a fleet whose workers run."""
    port = free_port()
    router = RouterConfig(port=port, admin=AdminConfig(port=free_port()))
    file = folder / f"{name}.yaml"
    file.write_text(
        yaml.safe_dump(config.model_copy(update={"router": router}).model_dump(mode="json"))
    )
    command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(file)]
    return Worker(command, port=port, name=name, health="/ready", deadline_s=READY_S)

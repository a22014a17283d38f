"""`vllm-sched demo FLEET.yaml`: what a fleet's pools are worth, on this machine, in minutes."""

from __future__ import annotations

import argparse
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
from vllm_sched.workers.launch import Worker, free_port

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
    workers = [
        described(config, without_cache(worker), beside, folder) for worker in config.workers
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


def without_cache(worker: WorkerConfig) -> WorkerConfig:
    """Switch prefix caching off: of two routers, the second would find its prompts cached."""
    told = worker.launch or LaunchConfig()
    launch = told.model_copy(update={"args": (*told.args, "--no-enable-prefix-caching")})
    return worker.model_copy(update={"launch": launch})


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

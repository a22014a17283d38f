"""`vllm-sched demo FLEET.yaml`: measure on this machine what a fleet's pools gain."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
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
from proxy.setup.app import url_of
from vllm_sched.bench.compare.compare import (
    Comparison,
    ComparisonPlan,
    Contender,
    ProgressReporter,
    measure,
    running,
)
from vllm_sched.bench.compare.workloads import LONG, build
from vllm_sched.cli.bench import compare as measuring
from vllm_sched.cli.fleet.fleet import Commands, fleet_command, read
from vllm_sched.cli.fleet.transfer_checks import unsupported_here
from vllm_sched.cli.fleet.up import assign_ports, make_worker
from vllm_sched.cli.output import writing
from vllm_sched.workers.connectors import ROLES
from vllm_sched.workers.launch import Worker, free_port, on_cpu

READY_S = 30.0
TRANSFERRED = re.compile(r'^proxy_handovers_total\{outcome="transferred"\} (\d+)$', re.MULTILINE)


def describe(commands: Commands) -> None:
    what = "measure on this machine what a fleet's pools gain"
    command = fleet_command(commands, "demo", what)
    measuring.add_options(command)
    command.set_defaults(func=lambda args: demo(args, read(args.fleet)))


def demo(arguments: argparse.Namespace, config: FleetConfig) -> int:
    """Play a load through the fleet of the file and through simpler fleets."""
    measuring.check(arguments)
    if problems := [
        Problem(f"workers[{index}].launch", "is missing; this command starts all workers itself")
        for index, worker in enumerate(config.workers)
        if worker.launch is None
    ]:
        raise ConfigError(str(arguments.fleet), problems)
    if problems := [*unsupported_here(config)]:
        raise ConfigError(str(arguments.fleet), problems)
    workload = build(arguments.workload, longs=arguments.longs, seed=arguments.seed)
    plan = ComparisonPlan(config.model, workload, arguments.rounds)
    handovers: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vllm-sched-demo-") as folder:
        play = partial(
            _play, arguments.fleet.parent, assign_ports(config), plan, Path(folder), handovers
        )
        status = measuring.run_measurement(play, arguments)
    hints = [] if status else watch_hints(arguments.fleet, config)
    for line in (*handovers, *hints):
        print(line)
    return status


def watch_hints(fleet: Path, config: FleetConfig) -> list[str]:
    admin = config.router.admin
    page = url_of(admin.host, admin.port, admin.tls)
    return [
        f"live: `{_command()} up {fleet}`, and the status page is {page}/",
        "dashboards: also run `docker compose --file deploy/compose/monitoring.yaml up` and open "
        "http://localhost:3000; it scrapes the ports of cpu-demo.yaml (see deploy/README.md); "
        "to use your own Grafana, import grafana/dashboards/*.json",
    ]


def _command() -> str:
    """Return this program's name or a path that works in a shell: `make` sets no PATH."""
    name = "vllm-sched"
    if shutil.which(name):
        return name
    return os.path.relpath(Path(sys.executable).with_name(name))


async def _play(
    beside: Path,
    config: FleetConfig,
    plan: ComparisonPlan,
    folder: Path,
    handovers: list[str],
    reporter: ProgressReporter,
) -> Comparison:
    """Measure all fleets; append a line on hand-overs to `handovers` for each."""
    workers = [
        make_worker(config, played_worker(worker, cpu), beside, folder)
        for worker, cpu in zip(config.workers, own_cpus(config.workers), strict=True)
    ]
    contenders = [
        Contender(name, label, router_of(fleet, folder, name))
        for name, (label, fleet) in fleets_to_play(config).items()
    ]
    async with running(workers, reporter), running([c.worker for c in contenders], reporter):
        await measure(contenders, plan, reporter)
        for contender, (_, fleet) in zip(contenders, fleets_to_play(config).values(), strict=True):
            if fleet.transfer is not None:
                page = await asyncio.to_thread(_page, contender.worker)
                handovers.append(f"{contender.label}: {describe_handovers(page, plan)}")
    return Comparison(plan, contenders)


def _page(router: Worker) -> str:
    return router.ask("/metrics", READY_S)[1].decode()


def describe_handovers(page: str, plan: ComparisonPlan) -> str:
    """Return a sentence on the hand-overs that a router's metrics page counts."""
    transferred = TRANSFERRED.search(page)
    longs = sum(arrival.klass == LONG for arrival in plan.workload.arrivals)
    requests = len(plan.workload.arrivals)
    return (
        f"{transferred[1] if transferred else 0} prompts handed over, in {plan.rounds} rounds "
        f"and a warm-up round, of {requests} requests each, {longs} of them long"
    )


def fleets_to_play(config: FleetConfig) -> dict[str, tuple[str, FleetConfig]]:
    """Return the ways to use these workers, simplest first, each on equally many CPUs.

    A fleet with all roles is also split into its parts, and one part makes the single pool: while
    it is played, the other part's workers are idle.
    """
    whole = [worker for worker in config.workers if worker.role not in ROLES]
    halves = [worker for worker in config.workers if worker.role in ROLES]
    policy = config.routing.policy
    fleets = {
        "baseline": ("one pool, round robin", one_pool(_with_workers(config, whole or halves)))
    }
    if whole and halves:
        fleets["pools"] = (f"short and long, {policy}", _with_workers(config, whole, moves=False))
        fleets["halves"] = ("prefill and decode", _with_workers(config, halves))
        fleets["all"] = ("all four roles", config)
    else:
        label = f"pools, {policy}" if whole else "prefill and decode"
        fleets["candidate"] = (label, config)
    return fleets


def _with_workers(
    config: FleetConfig, workers: Sequence[WorkerConfig], *, moves: bool = True
) -> FleetConfig:
    less = config.model_copy(update={"workers": tuple(workers)})
    if moves:
        return less
    routing = config.routing.model_copy(update={"disaggregate_above": "auto"})
    return less.model_copy(update={"transfer": None, "routing": routing})


def played_worker(worker: WorkerConfig, cpu: int | None) -> WorkerConfig:
    """Return a worker's launch settings: a CPU of its own and no prefix caching.

    With caching, the second of two routers would find its prompts in the workers' caches.
    """
    settings = worker.launch or LaunchConfig()
    cpus = settings.cpus or (() if cpu is None else (cpu,))
    args = (*settings.args, "--no-enable-prefix-caching")
    launch = settings.model_copy(update={"args": args, "cpus": cpus})
    return worker.model_copy(update={"launch": launch})


def own_cpus(workers: Sequence[WorkerConfig]) -> list[int | None]:
    """Return a CPU for each worker, or None if there are not enough.

    Prefill and decode workers share CPUs with the other roles, which are idle in the meantime.
    """
    offered = sorted(os.sched_getaffinity(0))
    cpus: dict[str, int | None] = {}
    for part in (True, False):
        names = [worker.name for worker in workers if (worker.role in ROLES) == part]
        alone = on_cpu() and len(offered) >= len(names)
        cpus |= zip(names, offered if alone else [None] * len(names), strict=False)
    return [cpus[worker.name] for worker in workers]


def one_pool(config: FleetConfig) -> FleetConfig:
    """Return the fleet as a plain load balancer uses it: any request to any worker."""
    alike = [
        worker.model_copy(update={"role": "general", "max_model_len": None})
        for worker in config.workers
    ]
    routing = RoutingConfig(policy="round_robin", prefix_affinity=False, tokenize=False)
    return config.model_copy(update={"workers": tuple(alike), "routing": routing, "transfer": None})


def router_of(config: FleetConfig, folder: Path, name: str) -> Worker:
    port = free_port()
    router = RouterConfig(port=port, admin=AdminConfig(port=free_port()))
    file = folder / f"{name}.yaml"
    # Without tenants, requests need no key; without discovery, no other worker gets requests.
    less = config.model_copy(update={"router": router, "tenants": (), "discovery": None})
    with writing(file):
        file.write_text(yaml.safe_dump(less.model_dump(mode="json")))
    command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(file)]
    return Worker(command, port=port, name=name, health="/ready", deadline_s=READY_S)

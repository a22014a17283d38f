"""The fleets: two general workers, and a prefill and a decode worker, on two processors.

To compare routes, the general workers also serve as a short and a long worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.isolation.identical import Pass, Route
from proxy.config import (
    FleetConfig,
    LaunchConfig,
    RoutingConfig,
    TransferConfig,
    WorkerConfig,
    parse,
)
from vllm_sched.bench.compare.compare import Contender
from vllm_sched.bench.compare.workloads import (
    BACKGROUND,
    LONG,
    SHORT,
    STEP_TOKENS,
    PlannedRequest,
    Workload,
)
from vllm_sched.cli.fleet.demo import router_of
from vllm_sched.cli.fleet.up import assign_ports, make_worker
from vllm_sched.cost.kv_size import kv_bytes_per_token
from vllm_sched.errors import UsageError
from vllm_sched.workers.launch import Worker
from vllm_sched.workers.tiny_model import tiny_model

LENGTH = 16384
FLAGS = (f"--max-model-len={LENGTH}", f"--max-num-batched-tokens={STEP_TOKENS}")
# The same KV cache in tokens: a block is 32 tokens on a CPU, 128 with NIXL.
BLOCKS = {"general": "2048", "prefill": "512", "decode": "512"}
ROLES = ("general", "general", "prefill", "decode")
SHORT_LIMIT = 500
# Enables POST /reset_prefix_cache.
ENV = {"VLLM_SERVER_DEV_MODE": "1"}


@dataclass(frozen=True)
class HandoverOptions:
    """Changes to the defaults of the prefill and the decode worker."""

    prefill: tuple[str, ...] = ()  # more flags
    decode: tuple[str, ...] = ()
    policies: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # decode worker
    mode: Literal["pull", "push"] = "pull"

    def launch(self, role: str, cpu: int) -> LaunchConfig:
        """Return the launch settings of a worker of this role."""
        more = {"prefill": self.prefill, "decode": self.decode}.get(role, ())
        return LaunchConfig(
            model="tiny",
            args=(*FLAGS, f"--num-gpu-blocks-override={BLOCKS[role]}", *more),
            policies={name: dict(settings) for name, settings in self.policies.items()}
            if role == "decode"
            else {},
            cpus=(cpu,),
            env=ENV,
        )


def fleet(options: HandoverOptions | None = None) -> FleetConfig:
    """Return all four workers; each pair uses both processors, one each."""
    options = options or HandoverOptions()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise UsageError("isolation: two processors are needed; this machine offers one")
    workers = [
        WorkerConfig.model_validate(
            {
                "name": f"{role}-{number % 2}",
                "role": role,
                "launch": options.launch(role, cpus[number % 2]),
            }
        )
        for number, role in enumerate(ROLES)
    ]
    return assign_ports(
        FleetConfig(
            model="tiny",
            workers=tuple(workers),
            transfer=TransferConfig(connector="nixl", mode=options.mode),
        )
    )


def workers(config: FleetConfig, folder: Path) -> list[Worker]:
    """Return the worker processes as `vllm-sched up` starts them."""
    return [make_worker(config, worker, folder, folder) for worker in config.workers]


def token_bytes() -> int:
    """Return the KV cache bytes per token on these workers."""
    config = json.loads((tiny_model() / "config.json").read_text())
    return kv_bytes_per_token(config, "float32")


def sides(
    config: FleetConfig, folder: Path, above: int | Literal["auto"] = "auto"
) -> tuple[Contender, Contender]:
    """Return a router for each pair; `above` is `disaggregate_above` of the second one."""
    general, split = config.workers[:2], config.workers[2:]
    combined = config.model_copy(
        update={
            "workers": general,
            "transfer": None,
            "routing": RoutingConfig(policy="least_loaded", prefix_affinity=False),
        }
    )
    handed = config.model_copy(
        update={"workers": split, "routing": RoutingConfig(disaggregate_above=above)}
    )
    return (
        Contender("baseline", "2 general, least_loaded", router_of(combined, folder, "general")),
        Contender("candidate", "1 prefill + 1 decode", router_of(handed, folder, "halves")),
    )


def admin_url(router: Worker) -> str:
    admin = parse(Path(router.command[-1]).read_text(), router.command[-1]).router.admin
    return f"http://{admin.host}:{admin.port}"


def routers(config: FleetConfig, folder: Path) -> tuple[Worker, Worker]:
    """Return a router that routes by size alone, and one that hands every request over."""
    general, split = config.workers[:2], config.workers[2:]
    sized = tuple(
        worker.model_copy(update={"name": f"{role}-0", "role": role})
        for worker, role in zip(general, ("short", "long"), strict=True)
    )
    by_size = config.model_copy(
        update={
            "workers": sized,
            "transfer": None,
            "routing": RoutingConfig(policy="length", short_limit=SHORT_LIMIT),
        }
    )
    handed = config.model_copy(
        update={
            "workers": split,
            "routing": RoutingConfig(disaggregate_above=1, prefix_affinity=False),
        }
    )
    return router_of(by_size, folder, "sized"), router_of(handed, folder, "handed")


def routes(
    config: FleetConfig, least_loaded: Worker, by_size: Worker, handed: Worker
) -> list[Route]:
    """Return the routes to compare; the first one has no router.

    Hand-overs have three passes: the prompt is cached on no worker, the prefill worker, or both.
    """
    urls = tuple(str(worker.url) for worker in config.workers)
    twice = Pass("cold", urls), Pass("warm")
    prefill_warm = Pass("warm on the prefill worker alone", urls[3:])
    return [
        Route("one worker", urls[0], twice),
        Route("2 general, least_loaded", least_loaded.url, twice),
        Route("short + long", by_size.url, twice),
        Route("1 prefill + 1 decode", handed.url, (twice[0], prefill_warm), decode=urls[3]),
        Route("1 prefill + 1 decode", handed.url, (twice[1],)),
    ]


def workload(
    *,
    longs: int = 4,
    every_s: float = 4.0,
    long_tokens: int = 12_000,
    decodes: int = 4,
    decoded: int = 3500,
    shorts_per_long: int = 4,
    seed: int = 0,
) -> Workload:
    """Return four streams, a long prompt every few seconds, and short prompts in between.

    If a prefill takes longer than `every_s`, long prompts wait for each other: see `verdict`.
    """
    arrivals: Sequence[PlannedRequest] = [
        *(PlannedRequest(0.0, BACKGROUND, 24, decoded) for _ in range(decodes)),
        *(PlannedRequest(number * every_s, LONG, long_tokens, 16) for number in range(longs)),
        *(
            PlannedRequest(round(0.3 + number * every_s / shorts_per_long, 6), SHORT, 100, 16)
            for number in range(longs * shorts_per_long)
        ),
    ]
    return Workload("isolation", tuple(arrivals), seed, lone_prompt_tokens=long_tokens)

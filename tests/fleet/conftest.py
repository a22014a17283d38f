"""Real vLLM workers, started two at a time, alive for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from proxy.config import FleetConfig, LaunchConfig, TransferConfig, WorkerConfig
from tests.collector import Collector
from vllm_sched.cli.up import described, placed
from vllm_sched.workers.launch import Side, Worker, worker
from vllm_sched.workers.tiny_model import tiny_model

FLAGS = (
    "--max-model-len", "16384",
    "--max-num-batched-tokens", "512",
    "--max-num-seqs", "64",
    "--enable-prefix-caching",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
ENDS = (
    "--max-model-len=16384",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=32",
    "--num-gpu-blocks-override=512",
    "--enable-prefix-caching",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)
# Each span is sent as soon as there is one.
TELLS = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
}
Policies = dict[str, dict[str, object]]
# Above 1,000 tokens is long; the structured-output backend starts with the first request.
SETTINGS: Policies = {"long_prompt": {"long_prefill_token_threshold": 1000}}


@pytest.fixture(scope="session")
def workers() -> Iterator[dict[str, Worker]]:
    """Start vLLM's own scheduler and ours."""
    sides = {
        "default": Side("default"),
        "long_prompt": Side("long_prompt", SETTINGS),
    }
    with ExitStack() as stack:
        started = {}
        for name, side in sides.items():
            each = worker(
                side,
                model=str(tiny_model()),
                # With all paths that vLLM has for such a model.
                flags=(*FLAGS, "--served-model-name", "tiny", "--enable-scale-out"),
                name=name,
                env={
                    "VLLM_LOGGING_LEVEL": "INFO",
                    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
                    "VLLM_ENABLE_COHERE_API": "1",
                },
            )
            stack.callback(each.stop)
            each.start()
            started[name] = each
        for each in started.values():
            each.wait_ready()
        yield started


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Listen for spans."""
    with Collector() as listening:
        yield listening


def both(
    transfer: TransferConfig,
    args: tuple[str, ...],
    env: Mapping[str, str] = MappingProxyType({}),
    policies: Mapping[str, Policies] = MappingProxyType({}),
) -> FleetConfig:
    """Describe a prefill and a decode worker, a processor each where there are two.

    `policies` are by role; without any it is vLLM's scheduler.
    """
    cpus = sorted(os.sched_getaffinity(0))
    workers = [
        WorkerConfig(
            name=f"{role}-0",
            role=role,
            launch=LaunchConfig(
                model="tiny",
                args=args,
                policies=policies.get(role, {}),
                cpus=(cpu,),
                env={
                    "VLLM_LOGGING_LEVEL": "INFO",
                    "VLLM_ENABLE_COHERE_API": "1",
                    **env,
                    "OTEL_SERVICE_NAME": f"{role}-0",
                },
            ),
        )
        for role, cpu in (("prefill", cpus[0]), ("decode", cpus[-1]))
    ]
    return placed(FleetConfig(model="tiny", workers=tuple(workers), transfer=transfer))


@contextmanager
def started(fleet: FleetConfig, logs: Path) -> Iterator[dict[str, Worker]]:
    """Start all workers of a fleet at once, as `vllm-sched up` would."""
    workers = {each.name: described(fleet, each, logs, logs) for each in fleet.workers}
    with ExitStack() as stack:
        for each in workers.values():
            stack.callback(each.stop)
            each.start()
        for each in workers.values():
            each.wait_ready()
        yield workers


@pytest.fixture(scope="session")
def fleet(collector: Collector) -> FleetConfig:
    """Describe two workers with NIXL between them, whose spans the collector gets."""
    traced = f"--otlp-traces-endpoint={collector.url}"
    return both(TransferConfig(connector="nixl"), (*ENDS, traced), TELLS)


@pytest.fixture(scope="session")
def ends(
    fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Worker]]:
    """Start both."""
    with started(fleet, tmp_path_factory.mktemp("ends")) as workers:
        yield workers

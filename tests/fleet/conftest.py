"""Real vLLM workers, alive for the whole session: to start one takes most of a minute.

There are two with NIXL between them, of which most tests are; a third one like them that may be
killed; and two whose KV caches are pushed. A test has its own only where nothing else will do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest

from proxy.config import FleetConfig, LaunchConfig, TransferConfig, WorkerConfig
from tests.collector import Collector
from vllm_sched.cli.fleet.up import described, placed
from vllm_sched.workers.launch import Worker, WorkerError, trace_flags, tracing

# With all paths that vLLM has for such a model.
PATHS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--enable-scale-out")
SEATS, FEW_SEATS = 32, 6
ARGS = (
    "--max-model-len=16384",
    "--max-num-batched-tokens=512",
    "--num-gpu-blocks-override=1024",
    "--enable-prefix-caching",
    *PATHS,
)
ENV = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_ENABLE_COHERE_API": "1",
}
# Each span is sent as soon as there is one.
TELLS = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
}
# The engine computes by itself, and starts no process for that: one import of vLLM less.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
Policies = dict[str, dict[str, object]]
# Above 1,000 tokens is long; the structured-output backend starts with the first request.
SETTINGS: Policies = {"long_prompt": {"long_prefill_token_threshold": 1000}}
# As many at once as do not contradict each other.
SETS: dict[str, Policies] = {
    "in parts": {
        "lanes": {}, "long_prompt": {"long_prefill_token_threshold": 800},
        "deferred_prefill": {"departures": 2}, "rotation": {"chunk": 128},
        "chunk_budget": {"itl_ms": 50.0},
    },
    "whole": {"static_batching": {"size": 4}, "prefill_first": {}},
}  # fmt: skip
PREFILL, DECODE, THIRD = "prefill-0", "decode-0", "third"


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
                env={**ENV, **env, "OTEL_SERVICE_NAME": f"{role}-0"},
            ),
        )
        for role, cpu in (("prefill", cpus[0]), ("decode", cpus[-1]))
    ]
    return placed(FleetConfig(model="tiny", workers=tuple(workers), transfer=transfer))


@contextmanager
def starting(fleet: FleetConfig, logs: Path) -> Iterator[dict[str, Worker]]:
    """Start all workers of a fleet at once, as `vllm-sched up` would; they are not ready yet."""
    workers = {each.name: described(fleet, each, logs, logs) for each in fleet.workers}
    with ExitStack() as stack:
        for each in workers.values():
            stack.callback(each.stop)
            each.start()
        yield workers


@contextmanager
def started(fleet: FleetConfig, logs: Path) -> Iterator[dict[str, Worker]]:
    """Start them, and wait until all are ready."""
    with starting(fleet, logs) as workers:
        for each in workers.values():
            each.wait_ready()
        yield workers


@pytest.fixture(scope="session")
def fleet(collector: Collector) -> FleetConfig:
    """Describe two workers with NIXL between them, whose spans the collector gets.

    One has vLLM's own scheduler, one ours.
    """
    args = (*ARGS, f"--max-num-seqs={SEATS}", f"--otlp-traces-endpoint={collector.url}")
    return both(TransferConfig(connector="nixl"), args, TELLS, {"prefill": SETTINGS})


@pytest.fixture(scope="session")
def ends(
    fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Worker]]:
    """Start both."""
    with started(fleet, tmp_path_factory.mktemp("ends")) as workers:
        yield workers


@pytest.fixture(scope="session")
def workers(ends: dict[str, Worker]) -> dict[str, Worker]:
    """Name both by their schedulers; to what is not handed over they are as any others."""
    return {"default": ends[DECODE], "long_prompt": ends[PREFILL]}


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Name the file that the third worker writes its trace to."""
    return tmp_path_factory.mktemp("trace") / "out.json"


@pytest.fixture(scope="session")
def third_or_dead(trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start one more with NIXL, ours and a trace, which is not ready yet."""
    launch = LaunchConfig(
        model="tiny",
        args=(*ARGS, f"--max-num-seqs={SEATS}", *trace_flags(())),
        policies=SETTINGS,
        cpus=(max(os.sched_getaffinity(0)),),
        env={**ENV, **ALONE, **tracing(trace_file)},
    )
    one = WorkerConfig(name=THIRD, role="decode", launch=launch)
    nixl = TransferConfig(connector="nixl")
    fleet = placed(FleetConfig(model="tiny", workers=(one,), transfer=nixl))
    with starting(fleet, tmp_path_factory.mktemp(THIRD)) as workers:
        yield workers[THIRD]


@pytest.fixture
def third(third_or_dead: Worker) -> Worker:
    """Give it when it is ready, started anew where a test has ended it.

    To NIXL its role is no matter: it prefills and it decodes.
    """
    try:
        third_or_dead.check()
    except WorkerError:
        revive(third_or_dead)
    third_or_dead.wait_ready()
    return third_or_dead


def revive(worker: Worker) -> None:
    """Start a worker that has ended again."""
    worker.stop()
    worker.start()
    worker.wait_ready()


@dataclass
class Compiled:
    """What two workers have compiled, by the files they keep of it."""

    folder: Path
    at_start: list[Path] = field(default_factory=list)

    def files(self) -> list[Path]:
        """List what is there now, however deep."""
        return sorted(self.folder.rglob("*"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Give the two that push a place of their own for that."""
    return Compiled(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def pushing_fleet(compiled: Compiled) -> FleetConfig:
    """Describe two of which one pushes to the other, and which have every policy between them."""
    env = {**ALONE, "TORCHINDUCTOR_CACHE_DIR": str(compiled.folder)}
    args = (*ARGS, f"--max-num-seqs={FEW_SEATS}")
    policies = {"prefill": SETS["in parts"], "decode": SETS["whole"]}
    return both(TransferConfig(connector="nixl", mode="push"), args, env, policies)


@pytest.fixture(scope="session")
def pushing(
    pushing_fleet: FleetConfig, compiled: Compiled, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Worker]]:
    """Start both."""
    with started(pushing_fleet, tmp_path_factory.mktemp("pushing")) as workers:
        compiled.at_start = compiled.files()
        yield workers

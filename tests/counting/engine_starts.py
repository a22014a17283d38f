"""Counts the engines that start, in whichever process: a plugin of vLLM's, for these tests alone.

vLLM finds it by the folder beside this file, which is on the path of each process that tests start.
"""

from __future__ import annotations

import functools
import os
from typing import Any

VARIABLE = "VLLM_SCHED_TESTS_ENGINE_STARTS"  # names the file that has a line for each
COUNTED = "_counted_by_tests"


def load() -> None:
    """Have each engine of this process note its start."""
    from vllm.v1.executor.abstract import Executor

    upstream = Executor.__init__
    if hasattr(upstream, COUNTED):
        return

    @functools.wraps(upstream)
    def counted(executor: Executor, *args: Any, **kwargs: Any) -> None:
        if path := os.environ.get(VARIABLE):
            note(path, " ".join([str(os.getpid()), *model_of(*args)]))
        upstream(executor, *args, **kwargs)

    setattr(counted, COUNTED, True)
    Executor.__init__ = counted


def model_of(config: Any = None, *_: Any) -> list[str]:
    """Name what the engine serves."""
    return [] if config is None else [str(config.model_config.served_model_name)]


def note(path: str, line: str) -> None:
    """Add a line, whole."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)

"""A vLLM plugin for tests that counts the engines that start in all processes.

vLLM finds it by the metadata folder beside this file, which is on PYTHONPATH in tests. A test that
stops workers while they start sets STALL, and no engine starts.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

VARIABLE = "VLLM_SCHED_TESTS_ENGINE_STARTS"  # the file with a line for each start
STALL = "VLLM_SCHED_TESTS_STALL_S"  # engines wait in place of starting
COUNTED = "_counted_by_tests"


def load() -> None:
    """Record the start of each engine in this process."""
    from vllm.v1.executor.abstract import Executor

    upstream = Executor.__init__
    if hasattr(upstream, COUNTED):
        return

    @functools.wraps(upstream)
    def counted(executor: Executor, *args: Any, **kwargs: Any) -> None:
        if seconds := os.environ.get(STALL):
            time.sleep(float(seconds))
            raise TimeoutError("the test has not stopped this engine")
        if path := os.environ.get(VARIABLE):
            note(path, " ".join([str(os.getpid()), *model_of(*args)]))
        upstream(executor, *args, **kwargs)

    setattr(counted, COUNTED, True)
    Executor.__init__ = counted


def model_of(config: Any = None, *_: Any) -> list[str]:
    """Return the names of the engine's model."""
    return [] if config is None else [str(config.model_config.served_model_name)]


def note(path: str, line: str) -> None:
    """Append a line in one write."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)

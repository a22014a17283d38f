"""Run pytest several times, each in a fork of this process, so that vLLM is imported once.

Reads a JSON list of runs: pytest's arguments, the working directory and an output file. Prints the
exit codes in order. Nothing here imports the package `tests`, which is upstream's in a run.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any

import pytest

gc.disable()  # an import makes no garbage, and takes a sixth less time

import vllm.entrypoints.llm  # noqa: E402, F401 - imported by upstream's conftest

import vllm_sched.engine.scheduler  # noqa: E402, F401 - all that takes long


def start(run: dict[str, Any]) -> int:
    """Fork a process for this run, and return its id."""
    if process := os.fork():
        return process
    status = 70
    try:
        os.chdir(run["folder"])
        output = os.open(run["output"], os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = int(pytest.main(run["arguments"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    gc.freeze()  # exclude imported modules from collections
    gc.enable()
    processes = [start(run) for run in json.load(sys.stdin)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes]
    sys.stdout.write(f"{json.dumps(statuses)}\n")

"""Read an engine's trace and match it with the client's requests.

Client and engine run on one machine and use one monotonic clock.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vllm_sched.workers.launch import DEFAULT, NONE, Side, Worker, WorkerError

WAITING, PREFILL, DECODE, PREEMPTED = "waiting", "prefill", "decode", "preempted"
WRITE_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
MICRO = 1e6
# The client's request name inside the engine's name: cmpl-round2-7-0-3f9a12bc.
REQUEST_NAME_PATTERN = re.compile(r"-(round\d+-\d+)-\d+-")


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a request in the engine, in seconds of the monotonic clock."""

    name: str
    start: float
    end: float
    tokens: int = 0


Stories: TypeAlias = Mapping[str, Sequence[Phase]]  # by the client's request name


def with_tracing(side: Side) -> Side:
    """Return the side with a scheduler that can be traced.

    Our scheduler without a policy replaces vLLM's own, which it equals.
    """
    return Side(NONE, side.settings, side.extra) if side.name == DEFAULT else side


def path_of(path: Path, role: str) -> Path:
    return path.with_name(f"{path.stem}.{role}{path.suffix or '.json'}")


def fetch(worker: Worker, path: Path) -> Stories:
    """Make a worker write its trace now, and read it."""
    path.unlink(missing_ok=True)
    worker.check()
    if worker.pid is not None:
        os.kill(worker.pid, signal.SIGUSR1)
    give_up = time.monotonic() + WRITE_TIMEOUT_S
    while not path.exists():  # the file is renamed when it is complete
        if time.monotonic() > give_up:
            raise WorkerError(
                f"{worker.name} wrote no trace to {path} within {WRITE_TIMEOUT_S:g} s"
            )
        worker.check()
        time.sleep(POLL_INTERVAL_S)
    return read(path)


def read(path: Path) -> Stories:
    names: dict[tuple[int, int], str] = {}
    stories: dict[str, list[Phase]] = defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        track = event["pid"], event.get("tid", 0)
        if event["ph"] == "M" and event["name"] == "thread_name":
            if match := REQUEST_NAME_PATTERN.search(event["args"]["name"]):
                names[track] = match[1]
        elif event["ph"] == "X" and track in names:
            start = event["ts"] / MICRO
            tokens = event.get("args", {}).get("tokens", 0)
            phase = Phase(event["name"], start, start + event["dur"] / MICRO, tokens)
            stories[names[track]].append(phase)
    return stories

"""CPU time and memory of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.router.processes import cpu_seconds, memory, running_on, tree
from tests.present import present

# A parent that sleeps while its child burns CPU time and holds memory.
CHILD = "held = b'x' * 50_000_000; print(flush=True)\nwhile True: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
DEADLINE_S = 60.0


@pytest.fixture
def parent() -> Iterator[int]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            present(process.stdout).readline()
            yield process.pid
        finally:
            for pid in reversed(tree(process.pid)):
                os.kill(pid, 9)


def test_children_are_counted(parent: int) -> None:
    pids = tree(parent)
    assert len(pids) == 2
    assert memory(pids).rss > memory(pids).pss > 50_000_000
    before = time.process_time()
    assert before <= cpu_seconds([os.getpid()]) <= time.process_time()
    begin, give_up = cpu_seconds(pids), time.monotonic() + DEADLINE_S
    while cpu_seconds(pids) < begin + 0.05:
        assert time.monotonic() < give_up


def test_ended_process_is_an_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(OSError, match="argument"):
        cpu_seconds([process.pid])


def test_running_on_applies_to_children_and_is_restored() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    shown = "import os; print(*os.sched_getaffinity(0))"
    with running_on(one):
        output = subprocess.run([sys.executable, "-c", shown], capture_output=True, check=True)
    assert {int(cpu) for cpu in output.stdout.split()} == one
    assert os.sched_getaffinity(0) == before
    with running_on(None):
        assert os.sched_getaffinity(0) == before

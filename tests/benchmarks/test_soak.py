"""`python -m benchmarks.soak`: faults of a router's processes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.soak import router as soak_router
from benchmarks.soak.router import Router, children_of
from tests.present import present
from tests.proxy.wire.site import eventually


@pytest.fixture
async def parent() -> AsyncIterator[Router]:
    """Return a router whose process is a shell with a child."""
    router = Router(Path(), 0, dict(os.environ), None)
    router.process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60 & wait")
    yield router
    # Kill the shell first, because it ends with its child.
    for pid in (router.process.pid, *children_of(router.process.pid)):
        os.kill(pid, 9)
    await router.process.wait()


def state(pid: int) -> str:
    """Return the kernel's state of a process: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_process_is_stopped_and_continued(
    parent: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = present(parent.process).pid
    await eventually(lambda: children_of(pid), within=20.0)
    [child] = children_of(pid)
    monkeypatch.setattr(soak_router, "STALL_S", (60.0, 60.0))
    stalling = asyncio.create_task(parent.stall_member(random.Random(1)))
    await eventually(lambda: state(child) == "T", within=20.0)
    assert state(pid) != "T"
    stalling.cancel()
    await asyncio.gather(stalling, return_exceptions=True)
    await eventually(lambda: state(child) != "T", within=20.0)
    assert parent.stalls == 1

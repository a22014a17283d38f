"""What `python -m benchmarks.soak` does to a router's processes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks import soak
from tests.present import present
from tests.proxy.wire.site import eventually


@pytest.fixture
async def parent() -> AsyncIterator[soak.Router]:
    """Take a shell that waits for a child for a router."""
    router = soak.Router(Path(), 0, dict(os.environ), None)
    router.process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60 & wait")
    yield router
    # The shell first: it ends with its child, and may be gone by then.
    for pid in (router.process.pid, *soak.children_of(router.process.pid)):
        os.kill(pid, 9)
    await router.process.wait()


def state(pid: int) -> str:
    """Return what the kernel says of a process: T where it was stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_process_stands_still_and_goes_on(
    parent: soak.Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = present(parent.process).pid
    await eventually(lambda: soak.children_of(pid), within=20.0)
    [child] = soak.children_of(pid)
    monkeypatch.setattr(soak, "STILL_S", (60.0, 60.0))
    standing = asyncio.create_task(parent.stand_still(random.Random(1)))
    await eventually(lambda: state(child) == "T", within=20.0)
    assert state(pid) != "T"
    standing.cancel()
    await asyncio.gather(standing, return_exceptions=True)
    await eventually(lambda: state(child) != "T", within=20.0)
    assert parent.stills == 1


def test_nobody_is_told_of_kills_that_would_not_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--minutes", "1", "--processes", "2", "--kill-member", "30"])
    assert "none would be killed" in capsys.readouterr().err

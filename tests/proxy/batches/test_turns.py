"""The cost of a scheduler turn with many waiting lines and little spare capacity."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from proxy.batches import scheduler as module
from proxy.batches.in_flight import BatchProgress
from proxy.batches.scheduler import BatchScheduler
from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.batches.storage.store_thread import StoreThread
from proxy.batches.types import Batch, LineJob, Status
from proxy.config.batches import BatchesConfig
from proxy.core.router import Router
from tests.proxy.batches.harness import CHAT
from tests.proxy.wire.conftest import Start

SIZES = (900, 500, 700)


@pytest.fixture
async def scheduler(start: Start, tmp_path: Path) -> BatchScheduler:
    """Return a scheduler with twenty running batches of three lines."""
    site = await start()
    store_thread = StoreThread(lambda: SqliteBackend(tmp_path), 1.0, StoreLimits())
    scheduler = BatchScheduler(site.wire, store_thread, BatchesConfig(path=tmp_path))
    for number in range(20):
        batch = Batch(
            f"b{number}", f"t{number}", CHAT, "file", "24h", Status.IN_PROGRESS, 0.0, 1e9, None
        )
        running = scheduler._running[batch.id] = BatchProgress(batch)
        running.ready = deque(
            LineJob(batch.id, n, f"c{n}", "tiny", b"x" * size) for n, size in enumerate(SIZES)
        )
    return scheduler


async def test_capacity_is_checked_once_per_smaller_size(
    scheduler: BatchScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def refuse(router: Router, model: str, now: float, size: int) -> bool:  # noqa: ARG001
        sizes.append(size)
        return False

    monkeypatch.setattr(module, "has_spare_capacity", refuse)
    scheduler._send_lines()
    assert sizes == [900, 500]  # only smaller sizes are checked again


async def test_batches_take_turns_within_the_spare_capacity(
    scheduler: BatchScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []

    def allow_small(router: Router, model: str, now: float, size: int) -> bool:  # noqa: ARG001
        return size < 800 and len(sent) < 30

    def send_one(now: float, running: BatchProgress, job: LineJob, tenant: Any) -> None:  # noqa: ARG001
        sent.append((running.batch.id, len(job.body)))

    monkeypatch.setattr(module, "has_spare_capacity", allow_small)
    monkeypatch.setattr(scheduler, "_send_line", send_one)
    scheduler._send_lines()
    assert sent == [*((f"b{n}", 500) for n in range(20)), *((f"b{n}", 700) for n in range(10))]

"""A router with batches before fake workers, and the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.proxy.batches.harness import BatchHarness
from tests.proxy.wire.conftest import Start, pytest_asyncio_loop_factories, start

__all__ = ["Start", "pytest_asyncio_loop_factories", "start"]


@pytest.fixture
async def harness(start: Start, tmp_path: Path) -> AsyncIterator[BatchHarness]:
    """Start a router with default settings before one worker."""
    # Tests skip minutes, and client connections must stay open.
    harness = BatchHarness(await start(wire={"idle_s": 3600.0}), tmp_path / "batches")
    await harness.open()
    yield harness
    await harness.close()

"""A router with batches, before fake workers, and the client most people have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.proxy.batches.office import Office
from tests.proxy.wire.conftest import Start, pytest_asyncio_loop_factories, start

__all__ = ["Start", "pytest_asyncio_loop_factories", "start"]


@pytest.fixture
async def office(start: Start, tmp_path: Path) -> AsyncIterator[Office]:
    """Start it, all settings at their defaults, before one worker."""
    # Tests skip minutes, in which no connection of a client is to be closed.
    office = Office(await start(wire={"idle_s": 3600.0}), tmp_path / "batches")
    await office.open()
    yield office
    await office.close()

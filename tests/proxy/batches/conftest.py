"""A router with batches before fake workers, and the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.proxy.batches.harness import OPEN, BatchHarness
from tests.proxy.batches.postgres import PostgresServer
from tests.proxy.wire.conftest import Start, pytest_asyncio_loop_factories, start

__all__ = ["Start", "pytest_asyncio_loop_factories", "start"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Start a server for all tests."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str | None:
    """Run a test with SQLite; see `BOTH`."""
    return new_database(request)


def new_database(request: pytest.FixtureRequest) -> str | None:
    """Return the URL of a new PostgreSQL database, or None for SQLite."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return None
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
async def harness(
    start: Start, tmp_path: Path, database: str | None
) -> AsyncIterator[BatchHarness]:
    """Start a router with default settings before one worker."""
    harness = BatchHarness(await start(wire=OPEN), tmp_path / "batches", database)
    await harness.open()
    yield harness
    await harness.close()

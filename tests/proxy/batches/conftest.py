"""A router with batches before fake workers, and the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from proxy.batches import scheduler
from proxy.batches.storage.postgres import PostgresBackend
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.batches.storage.store import Store
from tests.proxy.batches.harness import KEEP_S, OPEN, BatchHarness
from tests.proxy.batches.postgres import PostgresServer
from tests.proxy.wire.conftest import Start, pytest_asyncio_loop_factories, start
from tests.proxy.wire.site import Fake

__all__ = ["Start", "pytest_asyncio_loop_factories", "start"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str | None:
    """Run a test with SQLite; see `BOTH`."""
    return new_database(request)


@pytest.fixture
def store(tmp_path: Path, database: str | None) -> Iterator[Store]:
    store = Store(PostgresBackend(database) if database else SqliteBackend(tmp_path), KEEP_S)
    yield store
    store.close()


def new_database(request: pytest.FixtureRequest) -> str | None:
    """Return the URL of a new PostgreSQL database, or None for SQLite."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return None
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches that paused after an error go on soon."""
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.05)


class OpenHarness(Protocol):
    """Opens batches of a router before the given workers, or before one default worker."""

    def __call__(
        self,
        *fakes: Fake,
        router: dict[str, Any] | None = ...,
        wire: dict[str, Any] | None = ...,
        database: str | None = ...,
        **settings: Any,
    ) -> Awaitable[BatchHarness]: ...


@pytest.fixture
async def open_harness(start: Start, tmp_path: Path) -> AsyncIterator[OpenHarness]:
    """Open harnesses with the same folder, which are closed at the end."""
    opened: list[BatchHarness] = []

    async def begin(
        *fakes: Fake,
        router: dict[str, Any] | None = None,
        wire: dict[str, Any] | None = None,
        database: str | None = None,
        **settings: Any,
    ) -> BatchHarness:
        site = await start(*fakes, router=router, wire=OPEN | (wire or {}))
        opened.append(BatchHarness(site, tmp_path / "batches", database, **settings))
        await opened[-1].open()
        return opened[-1]

    yield begin
    for harness in reversed(opened):
        await harness.close()


@pytest.fixture
async def harness(open_harness: OpenHarness, database: str | None) -> BatchHarness:
    """Start a router with default settings before one worker."""
    return await open_harness(database=database)

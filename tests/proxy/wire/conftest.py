"""The router under test on real sockets, and the check for leftovers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import pytest
import uvloop

from proxy.wire import ticks
from tests.proxy.wire.site import Fake, Site, eventually, sockets

# Interval of a router's checks for overdue items. A test often waits for two of them.
SWEEP_S = 0.02


class Start(Protocol):
    """Starts a router before the given workers, or before one default worker."""

    def __call__(
        self, *fakes: Fake, router: Any = ..., wire: Any = ..., tls: ssl.SSLContext | None = ...
    ) -> Awaitable[Site]: ...


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use the router's event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start routers; check that no charge, ticket, task or socket is left at the end."""
    monkeypatch.setattr(ticks, "SWEEP_INTERVAL_S", SWEEP_S)
    sites: list[Site] = []
    tasks, open_before = asyncio.all_tasks(), sockets()

    async def begin(
        *fakes: Fake,
        router: dict[str, Any] | None = None,
        wire: dict[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Site:
        site = Site(router or {}, wire or {})
        site.wire.tls = tls
        sites.append(site)
        await site.start(fakes or (Fake(),))
        return site

    yield begin
    for site in sites:
        await site.stop()

    def left_tasks() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - tasks - {asyncio.current_task()}

    await eventually(lambda: not left_tasks(), lambda: f"tasks are left: {left_tasks()}")
    await eventually(
        lambda: sockets() <= open_before, lambda: f"{sockets() - open_before} sockets are left"
    )


@pytest.fixture
async def site(start: Start) -> Site:
    """Start a router before one worker with default settings."""
    return await start()

"""A real router on real sockets, in the loop of the test; and what each test must leave behind."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import pytest
import uvloop

from proxy.wire import ticks
from tests.proxy.wire.site import Fake, Site, eventually, sockets

# How often a router under test looks for what is late: a test waits for that, often twice.
SWEEP_S = 0.02


class Start(Protocol):
    """How a test starts a router: before the workers named, one if none is."""

    def __call__(
        self, *fakes: Fake, router: Any = ..., wire: Any = ..., tls: ssl.SSLContext | None = ...
    ) -> Awaitable[Site]:
        """Start workers and a router with settings that differ from the defaults."""


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on what the router runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start routers, and see at the end that no charge, ticket, task or socket is left of them."""
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

    def left() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - tasks - {asyncio.current_task()}

    await eventually(lambda: not left(), lambda: f"tasks are left: {left()}")
    await eventually(
        lambda: sockets() <= open_before, lambda: f"{sockets() - open_before} sockets are left"
    )


@pytest.fixture
async def site(start: Start) -> Site:
    """Start a router before one worker, all settings at their defaults."""
    return await start()

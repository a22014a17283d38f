"""The page of metrics: who asks for it may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.http.request import Request, RequestHead
from proxy.wire.client.metrics_request import MetricsRequest
from tests.proxy.wire.site import Site


class Visitor:
    """What is said to a client."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def write(self, data: bytes, /) -> None:
        self.heard.append(data[:15].decode())

    def done(self, now: float, *, keep_alive: bool) -> None:  # noqa: ARG002
        self.heard.append("done")

    def break_off(self) -> None:
        self.heard.append("broken off")


def visiting(
    site: Site, pages: Callable[[bool], Awaitable[tuple[bytes, str]]]
) -> tuple[MetricsRequest, Visitor]:
    """Begin a visit to a page that is written so."""
    site.wire.pages = pages
    visitor = Visitor()
    visit = MetricsRequest(site.wire, visitor, Request(RequestHead(), b""))
    visit.start(0.0)
    return visit, visitor


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_left_gets_nothing(site: Site, leaves: bool, fails: bool) -> None:
    written = asyncio.Event()

    async def pages(openmetrics: bool) -> tuple[bytes, str]:  # noqa: ARG001
        written.set()
        if fails:
            raise OSError("no page")
        return b"page", "text/plain"

    visit, visitor = visiting(site, pages)
    await written.wait()
    if leaves:  # before anybody hears that the task is done
        assert visitor.heard == []
        visit.gone(0.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    status = "HTTP/1.1 503 Se" if fails else "HTTP/1.1 200 OK"
    assert visitor.heard == ([] if leaves else [status, "done"])
    assert not site.wire.visits


async def test_a_page_that_is_not_written_yet_is_cancelled(site: Site) -> None:
    asked = asyncio.Event()

    async def pages(openmetrics: bool) -> tuple[bytes, str]:  # noqa: ARG001
        asked.set()
        await asyncio.Event().wait()
        return b"page", "text/plain"

    visit, visitor = visiting(site, pages)
    await asked.wait()
    visit.gone(0.0)
    assert visit._found is not None
    with pytest.raises(asyncio.CancelledError):
        await visit._found
    await asyncio.sleep(0)
    assert visitor.heard == []
    assert not site.wire.visits

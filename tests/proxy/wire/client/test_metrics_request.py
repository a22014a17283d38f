"""Requests for the metrics page from clients that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.http.request import Request, RequestHead
from proxy.wire.client.metrics_request import MetricsRequest
from tests.proxy.wire.site import Site


class RecordingClient:
    """Records what is written to a client."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, data: bytes, /) -> None:
        self.written.append(data[:15].decode())

    def end_response(self, now: float, *, keep_alive: bool) -> None:  # noqa: ARG002
        self.written.append("done")

    def break_off(self) -> None:
        self.written.append("broken off")


def start_request(
    site: Site, pages: Callable[[bool], Awaitable[tuple[bytes, str]]]
) -> tuple[MetricsRequest, RecordingClient]:
    """Start a request for a page that `pages` writes."""
    site.wire.write_metrics = pages
    client = RecordingClient()
    request = MetricsRequest(site.wire, client, Request(RequestHead(), b""))
    request.start(0.0)
    return request, client


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_client_that_left_gets_no_metrics_page(site: Site, leaves: bool, fails: bool) -> None:
    page_made = asyncio.Event()

    async def pages(openmetrics: bool) -> tuple[bytes, str]:  # noqa: ARG001
        page_made.set()
        if fails:
            raise OSError("no page")
        return b"page", "text/plain"

    request, client = start_request(site, pages)
    await page_made.wait()
    if leaves:  # before the callback of the task runs
        assert client.written == []
        request.client_left(0.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    status = "HTTP/1.1 503 Se" if fails else "HTTP/1.1 200 OK"
    assert client.written == ([] if leaves else [status, "done"])
    assert not site.wire.local_requests


async def test_client_that_leaves_cancels_the_metrics_page(site: Site) -> None:
    started = asyncio.Event()

    async def pages(openmetrics: bool) -> tuple[bytes, str]:  # noqa: ARG001
        started.set()
        await asyncio.Event().wait()
        return b"page", "text/plain"

    request, client = start_request(site, pages)
    await started.wait()
    request.client_left(0.0)
    assert request._writing is not None
    with pytest.raises(asyncio.CancelledError):
        await request._writing
    await asyncio.sleep(0)
    assert client.written == []
    assert not site.wire.local_requests

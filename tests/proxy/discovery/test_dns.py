"""Discovery by DNS."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

import pytest

from proxy.config import PoolConfig
from proxy.discovery import dns
from proxy.discovery.dns import MAX_MISSES, DnsSource
from proxy.net.resolver import Addresses, Resolver
from tests.proxy.discovery.api_server import RecordingListener

NXDOMAIN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
DEADLINE_S = 10.0
SERVFAIL = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def run_source(
    monkeypatch: pytest.MonkeyPatch, *answers: list[str] | OSError, port: int | None = None
) -> RecordingListener:
    """Run a source on these answers in turn; return its listener."""
    remaining = list(answers)
    exhausted, loop, stopped = asyncio.Event(), asyncio.get_running_loop(), threading.Event()

    def resolve(host: str) -> Addresses:
        assert host == "short.llm"
        if not remaining:
            loop.call_soon_threadsafe(exhausted.set)
            stopped.wait(DEADLINE_S)  # so that no other failure is reported
            raise SERVFAIL
        answer = remaining.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return tuple(answer)

    monkeypatch.setattr(dns, "RESOLVER", Resolver(resolve))  # without look-ups of other tests
    listener = RecordingListener()
    source = DnsSource(0.001, PoolConfig(name="short", dns="short.llm", port=port))
    task = asyncio.create_task(source.run(listener))
    async with asyncio.timeout(DEADLINE_S):
        await exhausted.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    stopped.set()
    return listener


async def test_each_address_is_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = await run_source(monkeypatch, ["10.0.0.2", "10.0.0.1", "10.0.0.1"])
    assert [endpoint.url for endpoint in listener.updates[0].values()] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
    ]
    assert list(listener.updates[0]) == ["short-10.0.0.1", "short-10.0.0.2"]


async def test_ipv4_is_preferred_to_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = await run_source(monkeypatch, ["fd00::1", "10.0.0.1"], ["fd00::1"], port=9)
    assert [endpoint.url for endpoint in listener.updates[0].values()] == ["http://10.0.0.1:9"]
    assert listener.updates[1]["short-fd00--1"].url == "http://[fd00::1]:9"


async def test_missing_address_is_removed_after_max_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = await run_source(
        monkeypatch,
        ["10.0.0.1", "10.0.0.2"],
        *[["10.0.0.1"]] * MAX_MISSES,
        ["10.0.0.1", "10.0.0.2"],
    )
    seen = [endpoints.get("short-10.0.0.2") for endpoints in listener.updates]
    assert [endpoint and endpoint.ready for endpoint in seen] == [True, False, False, None, True]


async def test_returned_address_resets_its_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    both, one = ["10.0.0.1", "10.0.0.2"], ["10.0.0.1"]
    listener = await run_source(monkeypatch, both, one, one, both, one, one)
    assert all("short-10.0.0.2" in endpoints for endpoints in listener.updates)


async def test_unknown_name_is_empty_and_server_failure_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = await run_source(monkeypatch, NXDOMAIN, SERVFAIL)
    assert listener.updates == [{}]
    assert listener.failures == [f"short.llm can't be looked up: {SERVFAIL}"]

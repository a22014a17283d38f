"""Look-ups of a headless service's name."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

import pytest

from proxy.config import PoolConfig
from proxy.discovery import dns
from proxy.discovery.dns import MAX_MISSES, DnsSource
from proxy.discovery.endpoints import Endpoints
from proxy.net.resolver import Addresses, Resolver

NXDOMAIN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
DEADLINE_S = 10.0
SERVFAIL = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class Ear:
    """Hears what is told."""

    def __init__(self) -> None:
        self.told_so_far: list[Endpoints] = []
        self.troubles: list[str] = []

    def update(self, endpoints: Endpoints) -> None:
        self.told_so_far.append(endpoints)

    def fail(self, why: str) -> None:
        self.troubles.append(why)


async def hear(
    monkeypatch: pytest.MonkeyPatch, *answers: list[str] | OSError, port: int | None = None
) -> Ear:
    """Return what is told of these answers, in turn."""
    left = list(answers)
    over, loop, stopped = asyncio.Event(), asyncio.get_running_loop(), threading.Event()

    def ask(host: str) -> Addresses:
        assert host == "short.llm"
        if not left:
            loop.call_soon_threadsafe(over.set)
            stopped.wait(DEADLINE_S)  # or one more failure might be told
            raise SERVFAIL
        answer = left.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return tuple(answer)

    monkeypatch.setattr(dns, "RESOLVER", Resolver(ask))  # without what another test still looks up
    ear = Ear()
    source = DnsSource(0.001, PoolConfig(name="short", dns="short.llm", port=port))
    task = asyncio.create_task(source.run(ear))
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    stopped.set()
    return ear


async def test_each_address_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = await hear(monkeypatch, ["10.0.0.2", "10.0.0.1", "10.0.0.1"])
    assert [each.url for each in ear.told_so_far[0].values()] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
    ]
    assert list(ear.told_so_far[0]) == ["short-10.0.0.1", "short-10.0.0.2"]


async def test_a_worker_with_both_families_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = await hear(monkeypatch, ["fd00::1", "10.0.0.1"], ["fd00::1"], port=9)
    assert [each.url for each in ear.told_so_far[0].values()] == ["http://10.0.0.1:9"]
    assert ear.told_so_far[1]["short-fd00--1"].url == "http://[fd00::1]:9"


async def test_a_missing_address_is_gone_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = await hear(
        monkeypatch,
        ["10.0.0.1", "10.0.0.2"],
        *[["10.0.0.1"]] * MAX_MISSES,
        ["10.0.0.1", "10.0.0.2"],
    )
    of_two = [told.get("short-10.0.0.2") for told in ear.told_so_far]
    assert [each and each.ready for each in of_two] == [True, False, False, None, True]


async def test_one_that_comes_back_in_time_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    both, one = ["10.0.0.1", "10.0.0.2"], ["10.0.0.1"]
    ear = await hear(monkeypatch, both, one, one, both, one, one)
    assert all("short-10.0.0.2" in told for told in ear.told_so_far)


async def test_no_name_is_empty_and_no_server_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = await hear(monkeypatch, NXDOMAIN, SERVFAIL)
    assert ear.told_so_far == [{}]
    assert ear.troubles == [f"short.llm can't be looked up: {SERVFAIL}"]

"""Slots of workers that a host takes after it has lost the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from proxy.config.shared import SharedConfig
from proxy.core.fleet.worker_load import NO_LOAD
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Tenants, TenantSpec
from proxy.processes.ipc_messages import StoredResponses, UrgentChange, WorkersChanged
from proxy.processes.replicas import publish_times
from proxy.processes.replicas.limits import SharedLimiter
from proxy.processes.replicas.messages import Update, encode
from proxy.processes.replicas.publish_times import PUBLISH_INTERVAL_S, SMALL_INTERVAL_S
from proxy.processes.replicas.remote_sheets import LEASE_S
from proxy.processes.replicas.replication import Replication
from proxy.processes.shared.process_sheet import (
    BREAKER_CHANGES,
    LARGE_PREFILLS,
    LIFE,
    WAITING,
)
from proxy.processes.shared.shared_memory import MAX_REMOTE, SharedTable
from tests.proxy.processes.replicas.test_remote_sheets import LOAD, known
from tests.proxy.processes.router_group import DEADLINE_S
from tests.proxy.wire.site import eventually

ROW, LIMIT = 5, 8


class Host:
    """A host, and what it hears of two others."""

    def __init__(self, table: SharedTable, replicas: int = 1) -> None:
        self.table = table
        self.now = 10.0
        self.replication = Replication(
            table, nullcontext, send=lambda _: None, replicas=replicas, clock=lambda: self.now
        )
        self.replication.report(WorkersChanged((known(row=ROW, most=LIMIT),)))
        self._number = 0

    def hear(self, *members: str) -> int:
        """Hear itself, then others; return how many slots are left to them."""
        self._number += 1
        for member in (self.replication.name, *members):
            heard = {self.replication.name: self.replication._number}
            update = Update(member, self._number, self.now, whole=True, heard=heard)
            self.replication.handle(update, self.now)
        self.replication._reserve(self.now)
        return self.table.reserved(ROW)

    def report(self, requests: int) -> int:
        """Send a message with this number of requests; return how many slots are left to others."""
        sheet = self.table.sheet(0)
        sheet.write_count(LIFE, 1)
        sheet.write_load(ROW, (requests, *LOAD[1:]), 0.0)
        sheet.mark_changed(ROW)
        self.now += 0.02
        assert self.replication.next_message(self.now) is not None
        return self.table.reserved(ROW)


@pytest.fixture
def host() -> Iterator[Host]:
    table = SharedTable.make(1, MAX_REMOTE)
    yield Host(table)
    table.close()


@pytest.mark.parametrize("returns", [True, False])
def test_host_that_reconnects_first_takes_only_its_part(host: Host, *, returns: bool) -> None:
    """It takes all slots when the others do not return."""
    shared = host.hear("m", "n")
    assert shared == LIMIT - 3
    host.now += LEASE_S + 1.0
    host.replication._note_error(OSError())
    assert host.table.reserved(ROW) == shared
    assert host.hear() == shared
    if returns:
        host.now += 0.5
        assert host.hear("m") == shared
        host.now += 0.5
        assert host.hear("m", "n") == shared
    else:
        host.now += LEASE_S + 0.1
        assert host.hear() == 0


class Channel:
    """A channel that can be lost, or closed as uvloop's are."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.used = asyncio.Event()
        self.closed = False

    def publish(self, message: bytes) -> None:
        del message
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.used.set()

    async def drain(self) -> None: ...


async def start_publishing(host: Host) -> tuple[Channel, asyncio.Task[None]]:
    """Let a host publish; return its channel, which has been used."""
    channel = Channel()
    host.replication._open_channel = lambda _: nullcontext(channel)
    task = asyncio.create_task(host.replication.run())
    await channel.used.wait()
    return channel, task


async def test_host_that_stops_together_with_the_server_ends(host: Host) -> None:
    channel, task = await start_publishing(host)
    channel.closed = True
    task.cancel()
    await asyncio.wait([task], timeout=5.0)
    assert task.cancelled()


async def test_urgent_change_is_published_before_small_ones(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_times, "SMALL_INTERVAL_S", 1e9)
    channel, task = await start_publishing(host)
    await eventually(lambda: host.table.awaits_urgent)
    sheet = host.table.sheet(0)
    sheet.write_count(LIFE, 1)
    sheet.write_count(WAITING, 2)
    channel.used.clear()
    host.replication.report(UrgentChange())
    async with asyncio.timeout(DEADLINE_S):
        await channel.used.wait()
    task.cancel()
    await asyncio.wait([task])


def test_host_that_was_stopped_keeps_its_part(host: Host) -> None:
    shared = host.hear("m", "n")
    host.now += LEASE_S + 1.0
    host.replication._receive(encode(Update("m", 2, host.now)))  # before the next tick
    assert host.table.reserved(ROW) == shared
    host.now += LEASE_S + 1.0
    host.replication._publish(Channel(), small=True)
    assert host.table.reserved(ROW) == shared
    with pytest.raises(ConnectionError, match="closed"):
        host.replication._publish(Channel(ConnectionError("closed")), small=True)
    for _ in range(4):  # but others that stay silent are taken for dead
        host.now += 0.9
        host.replication._note_echo(host.now)
        host.replication._publish(Channel(), small=True)
    assert host.table.reserved(ROW) == 0


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError("Error 111 connecting to r:1."), "connecting to r:1;"),
        (TimeoutError(), "no answer within router.shared.timeout_s;"),
    ],
)
def test_lost_server_is_logged_with_the_reason(
    host: Host, caplog: pytest.LogCaptureFixture, error: Exception, shown: str
) -> None:
    caplog.set_level(logging.ERROR, "proxy")
    host.replication._note_error(error)
    assert shown in caplog.messages[0]


def test_slots_are_left_to_others_before_they_hear_that_these_are_free(host: Host) -> None:
    host.hear("m", "n")
    host.report(6)
    assert host.hear("m", "n") == 1  # of two
    assert host.report(0) == 5


def test_host_that_starts_without_the_server_takes_the_configured_part() -> None:
    table = SharedTable.make(1, MAX_REMOTE)
    host = Host(table, replicas=4)
    assert (table.hosts, table.reserved(ROW)) == (4, LIMIT - LIMIT // 4)
    host.replication._note_error(OSError())
    assert (table.hosts, table.reserved(ROW)) == (4, LIMIT - LIMIT // 4)
    # With the server, the number of hosts that are heard counts.
    host.hear("m")
    host.now += LEASE_S + 0.1
    host.hear("m")
    assert table.reserved(ROW) == LIMIT - LIMIT // 2
    host.replication._note_error(OSError())
    host.now += LEASE_S + 0.1
    host.replication._note_error(OSError())
    assert (table.hosts, table.reserved(ROW)) == (4, LIMIT - LIMIT // 4)
    table.close()


@pytest.mark.parametrize(
    ("requests", "tokens", "word", "at_once"),
    [
        (1, 100, None, False),
        (1, 100_000, None, False),
        (1, 100, LARGE_PREFILLS, True),
        (2, 100, None, True),  # of eight slots for two hosts
        (1, 100, WAITING, True),
        (1, 100, BREAKER_CHANGES, True),
        (1, 100, LIFE, True),
    ],
)
def test_small_changes_wait_for_others(
    host: Host, requests: int, tokens: int, word: int | None, *, at_once: bool
) -> None:
    replication, sheet = host.replication, host.table.sheet(0)
    sheet.write_count(LIFE, 1)
    for _ in range(2):
        host.hear("m")
        replication.next_message(host.now)
    host.now += PUBLISH_INTERVAL_S
    assert not replication.is_due(host.now)
    sheet.write_load(ROW, (requests, requests, tokens, *NO_LOAD[3:]), 0.0)
    sheet.mark_changed(ROW)
    if word is not None:
        sheet.write_count(word, 2)
    assert replication.is_due(host.now) is at_once
    assert replication.is_due(host.now + SMALL_INTERVAL_S)
    assert replication.next_message(host.now) is not None
    sheet.write_count(WAITING, 0)
    assert not replication.is_due(host.now + PUBLISH_INTERVAL_S)


def test_stored_responses_do_not_wait(host: Host) -> None:
    host.hear("m")
    host.replication.next_message(host.now)
    assert not host.replication.is_due(host.now)
    host.replication.report(StoredResponses((("resp_1", "a", "t"),)))
    assert host.replication.is_due(host.now)


@pytest.mark.parametrize(("replicas", "parts"), [(None, 1), (3, 3)])
async def test_limits_of_tenants_have_the_configured_parts_from_the_start(
    replicas: int | None, parts: int
) -> None:
    table = SharedTable.make(1, MAX_REMOTE)
    settings = SharedConfig(url="redis://127.0.0.1:1", replicas=replicas)
    Replication.on_redis(settings, None, table, send=lambda _: None)
    tenants = Tenants()
    tenants.replace([TenantSpec("t", limits=Limits(requests_per_minute=6))], {})
    limiter = SharedLimiter(settings, None, tenants, table, lambda: 0.0)
    [tenant] = tenants
    assert not limiter.is_up
    decided = [tenant.ledger.decide(0.0, 1) for _ in range(6)]
    assert sum(exceeded is None for exceeded in decided) == 6 // parts
    table.close()

"""Timeouts of workers: connect, first byte, and between pieces."""

from __future__ import annotations

import asyncio
import socket

import pytest

from proxy.core.fleet.worker import MAX_IDLE_PAGE_S
from proxy.core.model.specs import Gauges
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat, request
from tests.proxy.wire.site import Fake, Site, eventually


def pass_time(site: Site, seconds: float) -> None:
    """Skip time, and check the connections to workers."""
    site.skip(seconds)
    site.wire.pools.sweep(site.clock())


def check_timeout(site: Site, seconds: float) -> None:
    """Check that the only worker times out after `seconds`. The clock must stand still."""
    pass_time(site, 0.9 * seconds)
    assert site.worker().requests == 1
    pass_time(site, 0.2 * seconds)
    assert site.worker().requests == 0


@pytest.mark.parametrize("limit", ["connect_s", "first_byte_s"])
async def test_worker_that_times_out_gets_504(site: Site, limit: str) -> None:
    site.stand_still()
    if limit == "connect_s":
        await site.fake.hang()
    site.fake.always(scripts.stall)
    asking = asyncio.create_task(site.ask(chat()))
    await eventually(lambda: site.worker().requests == 1)
    if limit == "first_byte_s":
        await site.fake.got()
    check_timeout(site, getattr(site.wire.settings, limit))
    answer = await asking
    assert (answer.status, answer.error()["code"]) == (504, "timeout")
    for call in site.fake.served:
        await call.was_lost()  # the worker can stop


async def test_first_byte_timeout_grows_with_the_expected_tokens(start: Start) -> None:
    """The response starts after 400 tokens of 3 ms, each of which may take four times as long."""
    site = await start(Fake("w0"), Fake("w1"))
    site.stand_still()
    for worker in (site.worker("w0"), site.worker("w1")):
        worker.pace.steps, worker.pace.base_s, worker.pace.sequence_s = 1.0, 0.003, 0.0
    made = asyncio.Event()
    site.always(scripts.gated(made, scripts.answer()))
    asking = asyncio.create_task(site.ask(chat(max_tokens=400)))
    await eventually(site.served)
    pass_time(site, site.wire.settings.first_byte_s + 0.9 * 400 * 0.012)
    made.set()
    assert (await asking).status == 200
    assert len(site.served()) == 1  # no retry


class Slow:
    """Two gated workers, one of which has exceeded the usual first-byte timeout."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.gates = {name: asyncio.Event() for name in site.fakes}
        for name, fake in site.fakes.items():
            fake.always(scripts.gated(self.gates[name], scripts.obey(name)))

    async def begin(self, data: bytes) -> None:
        """Send a request, and skip the usual timeout."""
        self.asking = asyncio.create_task(self.site.ask(data))
        await eventually(self.site.served)
        [self.busy] = [name for name, fake in self.site.fakes.items() if fake.served]
        [self.other] = self.site.fakes.keys() - {self.busy}
        self.set_generated_tokens(1.0)
        self.skip()

    def set_generated_tokens(self, tokens: float) -> None:
        """Set the token counter on the metrics page of the busy worker."""
        gauges = Gauges(at=self.site.clock(), generation_tokens_total=tokens)
        self.site.fleet.health.set_gauges(self.busy, gauges)

    def skip(self) -> None:
        """Skip the usual timeout."""
        self.site.skip(self.site.wire.settings.first_byte_s)


@pytest.fixture
async def slow(start: Start) -> Slow:
    """Start two workers."""
    return Slow(await start(Fake("w0"), Fake("w1")))


async def test_unbounded_response_of_a_computing_worker_gets_more_time(slow: Slow) -> None:
    await slow.begin(chat(max_tokens=None))
    slow.set_generated_tokens(2.0)
    [connection] = slow.site.wire.pools.pool_for(slow.site.worker(slow.busy)).open
    await eventually(lambda: connection.deadline > slow.site.clock())
    slow.gates[slow.busy].set()
    assert (await slow.asking).status == 200
    assert len(slow.site.served()) == 1  # no retry


async def test_response_at_twice_the_timeout_is_not_retried(slow: Slow) -> None:
    """It would take as long on the next worker."""
    await slow.begin(chat(max_tokens=None))
    slow.skip()
    slow.set_generated_tokens(2.0)
    answer = await slow.asking
    assert (answer.status, answer.error()["code"]) == (504, "unfinished")
    [call] = slow.site.served()
    await call.was_lost()
    assert slow.site.worker(slow.busy).breaker.has_no_failures


@pytest.mark.parametrize("case", ["down", "hung", "long ago", "a stream", "nothing to compute"])
async def test_response_of_an_idle_worker_is_retried_elsewhere(slow: Slow, case: str) -> None:
    nothing = request(b'{"model": "tiny", "tokens": [1]}', path="/detokenize")
    asking = chat(stream=case == "a stream", max_tokens=None)
    await slow.begin(nothing if case == "nothing to compute" else asking)
    slow.set_generated_tokens(1.0 if case == "hung" else 2.0)
    if case == "down":
        slow.site.down(slow.busy)
    elif case == "long ago":
        slow.site.skip(MAX_IDLE_PAGE_S + 1)
    slow.gates[slow.other].set()
    assert (await slow.asking).status == 200
    assert len(slow.site.served()) == 2
    assert not slow.site.worker(slow.busy).breaker.has_no_failures


def options(transport: asyncio.Transport | None) -> tuple[int, int, int]:
    """Return whether a socket sends probes, when, and its user timeout."""
    assert transport is not None
    raw = transport.get_extra_info("socket")
    return (
        raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


async def test_sockets_use_keepalive_and_those_of_workers_a_user_timeout(site: Site) -> None:
    """A user timeout would end slow readers; `idle_s` limits these."""
    client = await site.client()
    assert (await client.ask(chat())).status == 200
    [connection] = site.wire.pools.pool_for(site.worker()).idle
    assert options(connection._transport) == (1, 15, 60_000)
    [of_client] = site.wire.clients
    assert options(of_client._transport) == (1, 15, 0)

"""Patience: with connecting, with the first byte, between pieces.

A hung worker hurts only its own requests.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from proxy.core.fleet.worker import MAX_IDLE_PAGE_S
from proxy.core.model.specs import Gauges
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Answer, chat, request
from tests.proxy.wire.site import Fake, Site, eventually

if TYPE_CHECKING:
    from tests.proxy.wire.fake_worker import Call


def lets_pass(site: Site, seconds: float) -> None:
    """Let so much time pass for the router, and have it look at its workers."""
    site.skip(seconds)
    site.wire.pools.sweep(site.clock())


def is_given(site: Site, seconds: float) -> None:
    """See that the only worker has so much time, and no more. Time must stand still else."""
    lets_pass(site, 0.9 * seconds)
    assert site.worker().requests == 1
    lets_pass(site, 0.2 * seconds)
    assert site.worker().requests == 0


async def test_connecting(start: Start) -> None:
    site = await start()
    site.stand_still()
    await site.fake.hang()
    asked = asyncio.create_task(site.ask(chat()))
    await eventually(lambda: site.worker().requests == 1)
    is_given(site, site.wire.settings.connect_s)
    answer = await asked
    assert answer.status == 504
    answer.error()


async def test_the_first_byte(start: Start) -> None:
    site = await start()
    site.stand_still()
    site.fake.always(scripts.stall)
    asked = asyncio.create_task(site.ask(chat()))
    call = await site.fake.got()
    is_given(site, site.wire.settings.first_byte_s)
    answer = await asked
    assert answer.status == 504
    assert answer.error()["code"] == "timeout"
    await call.was_lost()  # the worker need not go on


async def test_an_answer_of_many_tokens_is_not_taken_for_a_hang(start: Start) -> None:
    """It begins when all of it is made: 400 of 3 ms each, and each may take four times as long."""
    site = await start(Fake("w0"), Fake("w1"))
    site.stand_still()
    for worker in (site.worker("w0"), site.worker("w1")):
        worker.pace.steps, worker.pace.base_s, worker.pace.each_s = 1.0, 0.003, 0.0
    made = asyncio.Event()
    site.always(scripts.gated(made, scripts.answer()))
    asked = asyncio.create_task(site.ask(chat(max_tokens=400)))
    await eventually(site.served)
    lets_pass(site, site.wire.settings.first_byte_s + 0.9 * 400 * 0.012)
    made.set()
    assert (await asked).status == 200
    assert len(site.served()) == 1  # and nobody was asked twice


class Slow:
    """One of two workers has an answer to make, and its time is up; both are gated."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.gates = {name: asyncio.Event() for name in site.fakes}
        for name, fake in site.fakes.items():
            fake.always(scripts.gated(self.gates[name], scripts.obey(name)))

    async def begin(self, data: bytes) -> None:
        """Ask, and let the usual time pass."""
        self.asked = asyncio.create_task(self.site.ask(data))
        await eventually(self.site.served)
        [self.busy] = [name for name, fake in self.site.fakes.items() if fake.served]
        [self.other] = self.site.fakes.keys() - {self.busy}
        self.shows(1.0)
        self.skip()

    def shows(self, tokens: float) -> None:
        """Have the busy worker's page say that it has computed so much."""
        gauges = Gauges(at=self.site.clock(), generation_tokens_total=tokens)
        self.site.fleet.health.set_gauges(self.busy, gauges)

    def skip(self) -> None:
        """Let the usual time pass."""
        self.site.skip(self.site.wire.settings.first_byte_s)


@pytest.fixture
async def slow(start: Start) -> Slow:
    """Start two workers."""
    return Slow(await start(Fake("w0"), Fake("w1")))


async def test_an_answer_of_any_length_may_be_slow_from_a_worker_that_computes(slow: Slow) -> None:
    await slow.begin(chat(max_tokens=None))
    slow.shows(2.0)
    [connection] = slow.site.wire.pools.of(slow.site.worker(slow.busy)).open
    await eventually(lambda: connection.deadline > slow.site.clock())
    slow.gates[slow.busy].set()
    assert (await slow.asked).status == 200
    assert len(slow.site.served()) == 1  # and nobody was asked twice


async def test_one_that_takes_twice_the_usual_is_not_begun_anew(slow: Slow) -> None:
    """It would take as long on the next worker, and on the one after that."""
    await slow.begin(chat(max_tokens=None))
    slow.skip()
    slow.shows(2.0)
    answer = await slow.asked
    assert (answer.status, answer.error()["code"]) == (504, "unfinished")
    [call] = slow.site.served()
    await call.was_lost()
    assert slow.site.worker(slow.busy).breaker.has_no_failures


@pytest.mark.parametrize("how", ["down", "hung", "long ago", "a stream", "nothing to compute"])
async def test_elsewhere_it_is_begun_anew(slow: Slow, how: str) -> None:
    nothing = request(b'{"model": "tiny", "tokens": [1]}', path="/detokenize")
    asked = chat(stream=how == "a stream", max_tokens=None)
    await slow.begin(nothing if how == "nothing to compute" else asked)
    slow.shows(1.0 if how == "hung" else 2.0)
    if how == "down":
        slow.site.down(slow.busy)
    elif how == "long ago":
        slow.site.skip(MAX_IDLE_PAGE_S + 1)
    slow.gates[slow.other].set()
    assert (await slow.asked).status == 200
    assert len(slow.site.served()) == 2
    assert not slow.site.worker(slow.busy).breaker.has_no_failures


async def test_the_first_byte_of_a_head_that_drips(start: Start) -> None:
    """Bytes of a head that never ends are no answer."""
    site = await start(wire={"first_byte_s": 0.3, "idle_s": 0.3})
    site.fake.always(scripts.drip(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000, size=3, gap_s=0.02))
    answer = await site.ask(chat(), within=20.0)  # half as long as it drips
    assert answer.status in (502, 504)


async def test_between_pieces_of_a_stream(start: Start) -> None:
    site = await start()
    site.stand_still()
    site.fake.always(scripts.stream(2, end="stall"))
    client = await site.send(chat(stream=True))
    await client.head()
    body = b""
    while b"tok 1" not in body:
        body += await client.piece()
    is_given(site, site.wire.settings.idle_s)
    assert b'"error"' in await client.piece()
    assert await client.piece() == b""
    await site.fake.served[0].was_lost()


async def steadily(start: Start, *pieces: bytes) -> Answer:
    """Ask for an answer of which each piece comes when patience is all but spent."""
    idle_s = 100.0
    site = await start(wire={"first_byte_s": idle_s, "idle_s": idle_s})
    site.stand_still()
    turns = asyncio.Semaphore(0)

    async def slow(call: Call) -> None:
        for piece in pieces:
            await turns.acquire()
            await call.send(piece)

    site.fake.always(slow)
    asked = asyncio.create_task(site.ask(chat(stream=True)))
    await site.fake.got()
    [connection] = site.wire.pools.of(site.worker()).open
    for _ in pieces:
        lets_pass(site, 0.9 * idle_s)
        turns.release()
        await eventually(lambda: asked.done() or connection.deadline > site.clock() + 0.5 * idle_s)
    return await asked


END = scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK


TOKEN = scripts.chunk(scripts.token("tok"))
BEAT = scripts.chunk(b": keep-alive\n\n")


@pytest.mark.parametrize("piece", [TOKEN, BEAT], ids=["tokens", "comments"])
async def test_pieces_that_come_in_time_are_no_timeout(start: Start, piece: bytes) -> None:
    answer = await steadily(start, scripts.STREAM_HEAD + piece, *[piece] * 9, TOKEN + END)
    assert answer.body.endswith(scripts.token("tok") + scripts.DONE)
    assert answer.body.count(b"\n\n") == 12


async def test_a_worker_that_does_not_read_its_request(start: Start) -> None:
    site = await start(wire={"first_byte_s": 0.4})
    site.worker().max_model_len = None
    site.fake.reads = False
    answer = await site.ask(chat("x" * (12 << 20), max_tokens=1))
    assert answer.status == 504


async def test_a_machine_that_is_gone_is_noticed_by_the_kernel(start: Start) -> None:
    site = await start()
    await site.ask(chat())
    [connection] = site.wire.pools.of(site.worker()).idle
    assert connection._transport is not None
    raw = connection._transport.get_extra_info("socket")
    assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


async def test_a_client_whose_machine_is_gone_is_noticed_by_the_kernel(start: Start) -> None:
    """But who reads slowly is there: for that `idle_s` is the bound."""
    site = await start()
    client = await site.client()
    await eventually(lambda: len(site.wire.clients) == 1)
    [theirs] = site.wire.clients
    raw = theirs._transport.get_extra_info("socket")
    assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    client.close()

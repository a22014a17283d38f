"""Messages made wrong on real sockets: clients before a router, and workers behind one."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence

import pytest

from proxy.http.request import Request
from tests.fuzz import judge
from tests.fuzz.mutate import Mutator
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import BrokenError, Client, chat
from tests.proxy.wire.site import Site

SEED, STREAMS, AT_ONCE, MANY_AT_ONCE = 12, 240, 24, 80
WITHIN_S = 30.0
# What the router says of its own accord to what is wrong, and what fakes say.
PROPER = {200, 400, 401, 404, 405, 408, 413, 417, 431, 505}
QUICK = {"linger_s": 0.05, "first_byte_s": 0.5, "idle_s": 0.5, "count_s": 0.5}
ENDS = ("close", "reset", "stall", "keep")


async def play(site: Site, number: int, heard: bytearray | None = None) -> int:
    """Send one stream of requests, and read the answers that are due, then perhaps a refusal.

    Return how many requests were taken. `heard` gets all bytes that the router sends.
    """
    mutator = Mutator(SEED, number)
    data = b"".join(mutator.requests())
    taken, _, why = judge.read([data])
    data = up_to_the_end(data, taken)
    client = await site.client()
    if heard is not None:
        record(client, heard)
    try:
        for piece in mutator.cuts(data):
            if client.writer.is_closing():  # the router has refused what came before
                break
            client.writer.write(piece)
            await asyncio.sleep(0)
        for at, request in enumerate(taken):
            await answered(client, request)
            if not request.head.keep_alive:
                assert await client.closed(within=WITHIN_S) == b""
                return at + 1
        if why is not None:
            refused = await client.answer(within=WITHIN_S)
            if refused.status == 100:
                refused = await client.answer(within=WITHIN_S)
            assert refused.status in PROPER - {200}, (refused, why)
            refused.error()
            assert await client.closed(within=WITHIN_S) == b""
        return len(taken)
    finally:
        client.close()


def up_to_the_end(data: bytes, taken: Sequence[Request]) -> bytes:
    """Leave out what follows a request that closes the connection.

    Bytes that come after the close reset the connection, perhaps before its answer is read.
    """
    if not taken or taken[-1].head.keep_alive:
        return data
    sizes = range(len(data) + 1)
    return data[: bisect_left(sizes, len(taken), key=lambda size: count_taken(data[:size]))]


def count_taken(data: bytes) -> int:
    """Return how many whole requests these bytes hold."""
    return len(judge.read([data])[0])


def record(client: Client, heard: bytearray) -> None:
    """Copy what a client receives."""
    feed = client.reader.feed_data

    def copy(data: bytes) -> None:
        heard.extend(data)
        feed(data)

    client.reader.feed_data = copy


async def answered(client: Client, request: Request) -> None:
    """Read the answer to one request."""
    head_only = request.head.method == "HEAD"
    answer = await client.answer(head_only=head_only, within=WITHIN_S)
    if answer.status == 100:
        answer = await client.answer(head_only=head_only, within=WITHIN_S)
    assert answer.status in PROPER, (answer, request.head.start, request.body)


async def test_each_stream_of_requests_gets_the_answers_that_are_due(start: Start) -> None:
    site = await start(wire={"linger_s": WITHIN_S})  # a refused client has the time to read that
    site.fake.always(scripts.answer())
    taken = 0
    for first in range(0, STREAMS, AT_ONCE):
        numbers = range(first, first + AT_ONCE)
        taken += sum(await asyncio.gather(*(play(site, number) for number in numbers)))
    assert taken > STREAMS / 2
    assert len(site.fake.served) > STREAMS / 4
    # `Site.stop` sees that nothing is left, and that the worker found no fault with what it got.


async def answers_wrongly(call: Call) -> None:
    """Answer with what a number says."""
    [number] = call.all(b"x-number")
    mutator = Mutator(SEED, int(number))
    pieces = mutator.cuts(b"".join(mutator.answers()))
    gap_s = 0.001 if len(pieces) < 20 else 0.0
    await scripts.raw(*pieces, gap_s=gap_s, end=mutator.random.choice(ENDS))(call)


async def hear(site: Site, number: int) -> str:
    """Ask a worker that answers wrongly; say what came of it."""
    client = await site.client()
    try:
        answer = await client.ask(chat("hi", b"X-Number: %d" % number), within=WITHIN_S)
    except (BrokenError, ConnectionError):
        return "broken"
    finally:
        client.close()
    if answer.status in (502, 504) and b'"server_error"' in answer.body:
        answer.error()
        return "refused"
    return "passed"


async def keep_closed(site: Site) -> None:
    """Close the worker's breaker in each turn of the event loop."""
    while True:
        site.fleet.health.succeeded(site.worker())
        await asyncio.sleep(0)


async def test_each_request_to_a_hostile_worker_has_an_end(start: Start) -> None:
    site = await start(wire=QUICK)
    site.fake.always(answers_wrongly)
    came: list[str] = []
    breaker = asyncio.create_task(keep_closed(site))
    for first in range(0, STREAMS, MANY_AT_ONCE):
        numbers = range(first, first + MANY_AT_ONCE)
        came += await asyncio.gather(*(hear(site, number) for number in numbers))
    breaker.cancel()
    assert set(came) == {"broken", "refused", "passed"}
    assert len(site.fake.served) > STREAMS * 3 / 4
    site.fake.always(scripts.answer())
    assert (await site.ask(chat())).status == 200
    # Its own: it goes on talking after what was a whole answer, while another request comes.
    site.fake.faults.clear()


@pytest.mark.parametrize(
    "more",
    [
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100,
        b"HTTP/1.1 200 OK\r\n" + b"X-Y: z\r\n" * 100,
        b"\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 1000,
    ],
    ids=["interim answers", "headers", "blank lines", "an extension"],
)
async def test_a_worker_that_never_gets_to_the_point_is_given_up(start: Start, more: bytes) -> None:
    site = await start(wire=QUICK)

    async def flood(call: Call) -> None:
        await call.send(more)
        tail = more if more.startswith((b"HTTP/1.1 103", b"\r\n")) else more[-8:] * 100
        while not call.connection.gone.is_set():
            await call.send(tail)
            await asyncio.sleep(0.001)

    site.fake.always(flood)
    answer = await site.ask(chat(), within=WITHIN_S)
    assert answer.status in (502, 504)
    await site.fake.connections[0].gone.wait()

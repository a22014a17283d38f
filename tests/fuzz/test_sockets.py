"""Mutated messages on real sockets: from clients and from workers."""

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

SEED, STREAMS, CONCURRENT_STREAMS, CONCURRENT_REQUESTS = 12, 240, 24, 80
WITHIN_S = 30.0
# The router's refusals and the fakes' statuses.
EXPECTED_STATUSES = {200, 400, 401, 404, 405, 408, 413, 417, 431, 505}
SHORT_TIMEOUTS = {"linger_s": 0.05, "first_byte_s": 0.5, "idle_s": 0.5, "count_s": 0.5}
ENDS = ("close", "reset", "stall", "keep")


async def play(site: Site, number: int, received: bytearray | None = None) -> int:
    """Send one stream of requests and read its answers, then a refusal if one is expected.

    Return how many requests were accepted. `received` gets all bytes that the router sends.
    """
    mutator = Mutator(SEED, number)
    data = b"".join(mutator.requests())
    taken, _, refusal = judge.read([data])
    data = until_close(data, taken)
    client = await site.client()
    if received is not None:
        record_received(client, received)
    try:
        for piece in mutator.cuts(data):
            if client.writer.is_closing():  # the router refused an earlier piece
                break
            client.writer.write(piece)
            await asyncio.sleep(0)
        for at, request in enumerate(taken):
            await read_answer(client, request)
            if not request.head.keep_alive:
                assert await client.closed(within=WITHIN_S) == b""
                return at + 1
        if refusal is not None:
            refused = await client.answer(within=WITHIN_S)
            if refused.status == 100:
                refused = await client.answer(within=WITHIN_S)
            assert refused.status in EXPECTED_STATUSES - {200}, (refused, refusal)
            refused.error()
            assert await client.closed(within=WITHIN_S) == b""
        return len(taken)
    finally:
        client.close()


def until_close(data: bytes, taken: Sequence[Request]) -> bytes:
    """Remove the bytes after a request that closes the connection.

    Bytes after the close reset the connection, perhaps before the answer is read.
    """
    if not taken or taken[-1].head.keep_alive:
        return data
    sizes = range(len(data) + 1)
    return data[: bisect_left(sizes, len(taken), key=lambda size: count_taken(data[:size]))]


def count_taken(data: bytes) -> int:
    return len(judge.read([data])[0])


def record_received(client: Client, received: bytearray) -> None:
    feed = client.reader.feed_data

    def copy(data: bytes) -> None:
        received.extend(data)
        feed(data)

    client.reader.feed_data = copy


async def read_answer(client: Client, request: Request) -> None:
    head_only = request.head.method == "HEAD"
    answer = await client.answer(head_only=head_only, within=WITHIN_S)
    if answer.status == 100:
        answer = await client.answer(head_only=head_only, within=WITHIN_S)
    assert answer.status in EXPECTED_STATUSES, (answer, request.head.start, request.body)


async def test_each_stream_of_requests_gets_its_answers(start: Start) -> None:
    site = await start(wire={"linger_s": WITHIN_S})  # time for a refused client to read the refusal
    site.fake.always(scripts.answer())
    taken = 0
    for first in range(0, STREAMS, CONCURRENT_STREAMS):
        numbers = range(first, first + CONCURRENT_STREAMS)
        taken += sum(await asyncio.gather(*(play(site, number) for number in numbers)))
    assert taken > STREAMS / 2
    assert len(site.fake.served) > STREAMS / 4
    # `Site.stop` checks that nothing is left and that the worker found no fault.


async def answer_mutated(call: Call) -> None:
    """Send the mutated answers of the request's number."""
    [number] = call.all(b"x-number")
    mutator = Mutator(SEED, int(number))
    pieces = mutator.cuts(b"".join(mutator.answers()))
    gap_s = 0.001 if len(pieces) < 20 else 0.0
    await scripts.raw(*pieces, gap_s=gap_s, end=mutator.random.choice(ENDS))(call)


async def ask_hostile_worker(site: Site, number: int) -> str:
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


async def keep_breaker_closed(site: Site) -> None:
    """Close the worker's breaker in each turn of the event loop."""
    while True:
        site.fleet.health.record_success(site.worker())
        await asyncio.sleep(0)


async def test_each_request_to_a_hostile_worker_has_an_end(start: Start) -> None:
    site = await start(wire=SHORT_TIMEOUTS)
    site.fake.always(answer_mutated)
    outcomes: list[str] = []
    breaker = asyncio.create_task(keep_breaker_closed(site))
    for first in range(0, STREAMS, CONCURRENT_REQUESTS):
        numbers = range(first, first + CONCURRENT_REQUESTS)
        outcomes += await asyncio.gather(*(ask_hostile_worker(site, number) for number in numbers))
    breaker.cancel()
    assert set(outcomes) == {"broken", "refused", "passed"}
    assert len(site.fake.served) > STREAMS * 3 / 4
    site.fake.always(scripts.answer())
    assert (await site.ask(chat())).status == 200
    # The fake's own faults: it sends more bytes after a whole answer.
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
async def test_worker_without_a_final_answer_is_given_up(start: Start, more: bytes) -> None:
    site = await start(wire=SHORT_TIMEOUTS)

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

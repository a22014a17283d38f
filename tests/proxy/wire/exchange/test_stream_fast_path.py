"""Whole chunks and whole responses pass without parsing; all other data is parsed."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.fleet.charges import Fleet
from proxy.core.model.role import Role
from proxy.core.model.route_table import ROUTES, Route
from proxy.core.model.specs import WorkerSpec
from proxy.core.router import Router, RouterSettings
from proxy.http.request import Request, RequestHead
from proxy.http.sent_text import CHAT_FAILURES
from proxy.http.sse import EventStream
from proxy.metrics.registry import Metrics
from proxy.wire.exchange.exchange import Exchange
from proxy.wire.exchange.stream_fast_path import StreamCounter, StreamFastPath, size_line
from proxy.wire.server import WireServer
from proxy.wire.settings import WireSettings
from proxy.wire.worker.connection import WorkerConnection
from tests.proxy.wire import scripts

HEAD = scripts.STREAM_HEAD
TOKENS = [scripts.token(f"number {number}") for number in range(12)]
USAGE = scripts.usage_event(7, 12)
ROUTE = next(route for route in ROUTES.values() if route.name == "chat/completions")


def open_transport() -> Mock:
    """Return a worker's transport that accepts everything."""
    return Mock(**{"is_closing.return_value": False, "get_write_buffer_size.return_value": 0})


class Client:
    """A client that records what it gets."""

    writable = True

    def __init__(self) -> None:
        self.got = b""
        self.is_over = False

    def write(self, data: bytes) -> None:
        self.got += data

    def end_response(self, now: float, *, keep_alive: bool) -> None:  # noqa: ARG002
        self.is_over = True

    def break_off(self) -> None:
        self.is_over = True


class Stream:
    """One exchange whose worker connection the test feeds."""

    def __init__(self) -> None:
        fleet = Fleet()
        fleet.roster.add(WorkerSpec("w0", "http://127.0.0.1:1", Role.GENERAL, "tiny"))
        self.now = 100.0
        for _ in range(2):
            fleet.health.probe_ok("w0", self.now)
        self.metrics = Metrics(Router(RouterSettings(), fleet))
        wire = WireServer(self.metrics.router, WireSettings(), self.metrics, lambda: self.now)
        self.client = Client()
        pool = wire.pools.pool_for(next(iter(fleet.roster)))
        self.connection = WorkerConnection(pool)
        pool.open.add(self.connection)
        pool.idle.append(self.connection)
        self.connection._transport = open_transport()
        self.exchange = Exchange(wire, self.client, _request(ROUTE), ROUTE)
        self.exchange.start(self.now)

    def receive(self, data: bytes) -> None:
        """Receive data from the worker 20 ms later."""
        self.now += 0.02
        self.connection.data_received(data)

    @property
    def passes(self) -> bool:
        """Whether the next whole chunk passes unparsed."""
        return self.connection.fast_path is not None

    def outcome(self) -> tuple[bytes, int, int, int, int, bool]:
        """Return everything that the stream changed."""
        record, got = self.exchange.record, self.client.got
        head, _, framed = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        gaps = sum(series.cumulative()[-1] for series in self.metrics.gaps.values())
        assert gaps <= record.later_tokens
        assert record.sent_bytes == len(got)
        lease = self.exchange._attempt.lease
        assert lease is not None
        body = dechunked(framed)
        return body, record.output_tokens, lease.seen_tokens, lease.decode_tokens, (
            self.metrics.router.sizer.learned("tiny", ROUTE.name).outputs
        ), self.client.is_over  # fmt: skip


def _request(route: Route) -> Request:
    head = RequestHead()
    head.method, head.path = "POST", "/v1/chat/completions"
    head.route = route
    head.start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: "
    body = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    return Request(head, body)


def dechunked(framed: bytes) -> bytes:
    """Return the body of strictly parsed chunks."""
    body, last = b"", False
    while framed:
        assert not last
        line, _, rest = framed.partition(b"\r\n")
        size = int(line, 16)
        assert line == b"%x" % size
        assert rest[size : size + 2] == b"\r\n"
        body, framed, last = body + rest[:size], rest[size + 2 :], size == 0
    return body


async def outcome_of(pieces: list[bytes], *, fast: bool = True) -> tuple[Any, ...]:
    """Return the outcome of these pieces, with or without the fast path."""
    stream = Stream()
    for piece in pieces:
        stream.receive(piece)
        if not fast:
            stream.connection.fast_path = None
    return stream.outcome()


def test_size_line_matches_the_only_chunk_of_a_length() -> None:
    lines = {}
    for size in range(1, 1 << 16):
        line = b"%x\r\n" % size
        lines[len(line) + size + 2] = line
    for length in range((1 << 16) + 20):
        assert size_line(length) == lines.get(length, b""), length


async def test_whole_chunks_pass_unparsed() -> None:
    stream = Stream()
    stream.receive(HEAD + scripts.chunk(TOKENS[0]))
    assert stream.passes
    before = len(stream.client.got)
    for token in TOKENS[1:]:
        stream.receive(scripts.chunk(token))
        assert stream.passes
    assert stream.client.got[before:] == b"".join(map(scripts.chunk, TOKENS[1:]))
    [gaps] = stream.metrics.gaps.values()
    assert gaps.cumulative()[-1] == len(TOKENS) - 1
    assert gaps.total == pytest.approx(0.02 * (len(TOKENS) - 1))
    assert stream.connection.deadline == stream.now + WireSettings().idle_s
    stream.receive(scripts.chunk(USAGE))
    stream.receive(scripts.chunk(scripts.DONE))
    assert stream.passes
    stream.receive(scripts.LAST_CHUNK)
    assert stream.metrics.router.sizer.learned("tiny", ROUTE.name).output == 12
    body, *_, outputs, is_over = stream.outcome()
    assert body == b"".join(TOKENS) + USAGE + scripts.DONE
    assert (outputs, is_over) == (1, True)
    assert not stream.passes


@pytest.mark.parametrize(
    "ends",
    [
        b',"finish_reason":%b,"token_ids":null}]}\n\n',
        # As vLLM ends the events of a completion.
        b',"finish_reason":%b,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n',
    ],
)
async def test_an_abort_is_parsed_though_its_event_ends_like_others(ends: bytes) -> None:
    stream = Stream()
    stream.receive(HEAD + scripts.chunk(TOKENS[0]))
    attempt = stream.exchange._attempt
    assert attempt is not None
    assert attempt.lease is not None
    leases = stream.metrics.router.leases
    counter = StreamCounter(leases, attempt.lease, stream.metrics, stream.exchange.record)
    path = StreamFastPath(
        counter,
        EventStream(),
        stream.client.write,
        changes_usage=False,
        failures=CHAT_FAILURES,
    )
    start = b'data: {"choices":[{"index":0,"text":"a","logprobs":null'
    for _ in range(3):
        assert path.pass_on(stream.now, scripts.chunk(start + ends % b"null"))
    assert not path.pass_on(stream.now, scripts.chunk(start + ends % b'"abort"'))


@pytest.mark.parametrize(
    "piece",
    [
        scripts.chunk(TOKENS[1])[:-1],  # an incomplete chunk
        scripts.chunk(TOKENS[1])[:-9],
        scripts.chunk(TOKENS[1][:-1]),  # a whole chunk of half an event
        scripts.chunk(TOKENS[1]) + b"4",  # and the start of the next chunk
        b"0" + scripts.chunk(TOKENS[1]),  # a leading zero
        scripts.chunk(TOKENS[1]).replace(b"\r\n", b";a=b\r\n", 1),
    ],
)
async def test_other_pieces_are_parsed(piece: bytes) -> None:
    whole = scripts.chunk(TOKENS[1])
    rest = {
        whole[:-1]: b"\n", whole[:-9]: whole[-9:], whole + b"4": b"\r\nab\n\n\r\n",
        scripts.chunk(TOKENS[1][:-1]): scripts.chunk(b"\n"),
    }.get(piece, b"")  # fmt: skip
    end = scripts.chunk(TOKENS[2]) + scripts.LAST_CHUNK
    cut = await outcome_of([HEAD + scripts.chunk(TOKENS[0]), piece, rest, end])
    assert cut == await outcome_of([HEAD + scripts.chunk(TOKENS[0]) + piece + rest + end])


async def test_fast_path_resumes_after_a_split_chunk() -> None:
    stream = Stream()
    stream.receive(HEAD + scripts.chunk(TOKENS[0]))
    stream.receive(scripts.chunk(TOKENS[1])[:20])
    assert not stream.passes
    stream.receive(scripts.chunk(TOKENS[1])[20:])
    assert stream.passes


async def test_fast_path_is_off_for_http_1_0() -> None:
    stream = Stream()
    stream.exchange.request.head.http_1_0 = True
    stream.receive(HEAD + scripts.chunk(TOKENS[0]))
    assert not stream.passes


WHOLE = b'{"id": "x", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 12}}'
LENGTH, JSON = (b"content-length", b"%d" % len(WHOLE)), (b"content-type", b"application/json")
HEADS = {
    "json": scripts.head(200, JSON, LENGTH),
    "coded": scripts.head(200, JSON, (b"content-encoding", b"br"), LENGTH),
    "text": scripts.head(200, LENGTH, (b"x-own", b"kept")),
    "other": scripts.head(404, JSON, LENGTH),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_whole_response_equals_the_same_in_pieces(name: str, version: bytes) -> None:
    outcomes = []
    for pieces in (
        [HEADS[name] + WHOLE],
        [HEADS[name], WHOLE],
        [HEADS[name] + WHOLE[:9], WHOLE[9:]],
    ):
        stream = Stream()
        request = stream.exchange.request.head
        request.http_1_0, request.keep_alive = version == b"1.0", version == b"1.1"
        for piece in pieces:
            stream.receive(piece)
        assert stream.client.is_over
        assert stream.exchange.record.sent_bytes == len(stream.client.got)
        learned = stream.metrics.router.sizer.learned("tiny", ROUTE.name)
        [(key, series)] = stream.metrics.requests.items()
        outcomes.append(
            (stream.client.got, learned.outputs, key, series.count, len(stream.metrics.recent))
        )
    assert outcomes[0] == outcomes[1] == outcomes[2]
    got, outputs, *_ = outcomes[0]
    assert got.endswith(b"\r\n\r\n" + WHOLE)
    assert outputs == (name == "json")


EVENTS = [*TOKENS, USAGE, scripts.DONE, b": kept alive\n\n", b"data: \xc3\xa9\r\n\r\n"]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3), min_size=1, max_size=8),
    st.lists(st.integers(0, 2000), max_size=12),
    st.booleans(),
)
def test_splits_do_not_change_the_outcome(
    chunks: list[list[bytes]], cuts: list[int], whole: bool
) -> None:
    """With `whole`, there is a split after each chunk as well."""
    framed = [scripts.chunk(b"".join(events)) for events in chunks]
    everything = HEAD + b"".join(framed) + scripts.LAST_CHUNK
    places = {len(HEAD), *(cut for cut in cuts if cut < len(everything))}
    if whole:
        at = len(HEAD)
        for chunk in framed:
            at += len(chunk)
            places.add(at)
    marks = [0, *sorted(places - {0}), len(everything)]
    pieces = [everything[a:b] for a, b in pairwise(marks)]

    async def compare() -> None:
        assert await outcome_of(pieces) == await outcome_of(pieces, fast=False)

    asyncio.run(compare())

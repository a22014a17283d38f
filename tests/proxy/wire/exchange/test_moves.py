"""Requests that leave a drained worker at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf
from typing import Any

import pytest

from proxy.core.request.continuable import FIELD, NO_TOKENS, NO_WORKER, NOT_KEPT, WAITS
from proxy.wire.exchange import moves
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.engines import TWO, Engines, journaled
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import Fake, Site, eventually

NO_RETRIES = {"retry_budget": 0.0, "max_attempts": 1}


async def drain(site: Site, name: str, within_s: float = 5.0) -> tuple[int, Mapping[str, int]]:
    site.fleet.roster.drain(name)
    return await site.wire.moves.move_all(name, within_s)


class Paced:
    """Streams that pause after four tokens from each worker."""

    def __init__(self, site: Site, engines: Engines) -> None:
        self.site, self.engines = site, engines
        self.rest = asyncio.Event()  # lets all tokens come
        self.clients: list[Client] = []
        site.always(engines.serve(pause=self.rest, pause_after=4))

    async def begin(self, count: int, *, only_first: bool = False, **fields: Any) -> None:
        """Start streams, all of them on the first worker if so wanted."""
        drain = self.site.fleet.roster.drain
        if only_first:
            drain("w1")
        data = self.engines.request(**fields)
        self.clients = [await self.site.send(data) for _ in range(count)]
        await self.published(*[4] * count)
        await self.site.swept()
        if only_first:
            drain("w1", draining=False)

    async def published(self, *tokens: int) -> None:
        """Wait until the streams have these numbers of tokens."""
        published = self.engines.published
        await eventually(lambda: [*map(len, published.values())] == [*tokens])

    async def end(self) -> None:
        """Let the streams end, and check that each client has one whole stream."""
        self.rest.set()
        for client in self.clients:
            self.engines.check(await client.answer())
        assert self.site.metrics.lost_streams == {}
        await self.site.settled()


async def paced(start: Start, *fakes: Fake, **router: Any) -> Paced:
    return Paced(*await journaled(start, *fakes, router=router))


async def test_streams_go_on_elsewhere(start: Start) -> None:
    streams = await paced(start, *TWO, **NO_RETRIES)
    site = streams.site
    await streams.begin(12)
    before = site.worker("w0").requests
    assert before > 0
    assert await drain(site, "w0") == (before, {})
    assert (site.worker("w0").requests, site.worker("w1").requests) == (0, 12)
    await streams.end()
    assert site.worker("w0").breaker.has_no_failures
    assert site.metrics.retries == {("w0", "drained"): before}
    assert site.metrics.continuations == {"w0": before}


async def test_a_stream_moves_again_and_again(start: Start) -> None:
    """More often than a request may fail."""
    streams = await paced(start, *TWO, **NO_RETRIES)
    site = streams.site
    await streams.begin(1)
    continuations = site.metrics.continuations
    for moved, tokens in enumerate((8, 12, 13), start=1):
        [name] = [name for name in site.fakes if site.worker(name).requests]
        assert await drain(site, name) == (1, {})
        site.fleet.roster.drain(name, draining=False)
        await streams.published(tokens)
        # A stream that moves before its client has new text repeats the same tokens.
        await eventually(lambda moved=moved: sum(continuations.values()) == moved)  # type: ignore[misc]
    await streams.end()
    assert len(streams.engines.asked) == 4


async def test_requests_without_a_byte_are_placed_anew(start: Start) -> None:
    site = await start(*TWO, router=NO_RETRIES)
    gate = site.hold()
    clients = [await site.send(chat()) for _ in range(6)]
    await eventually(lambda: len(site.served()) == 6)
    before = site.worker("w0").requests
    assert await drain(site, "w0") == (before, {})
    await eventually(lambda: len(site.fakes["w1"].served) == 6)
    gate.set()
    for client in clients:
        assert (await client.answer()).status == 200


# How many of three streams move, and why the others do not.
REMAINING: dict[str, tuple[int, dict[str, int]]] = {
    "a field": (0, {FIELD: 3}),
    "no journal here": (0, {NOT_KEPT: 3}),
    "no journal elsewhere": (0, {NO_WORKER: 3}),
    "the other worker is full": (1, {NO_WORKER: 2}),
    "its engine has completed it": (0, {NO_TOKENS: 3}),
}


@pytest.mark.parametrize("case", REMAINING)
async def test_what_cannot_move_ends_on_the_drained_worker(start: Start, case: str) -> None:
    streams = await paced(start, Fake("w0"), Fake("w1", max_requests=1))
    site = streams.site
    await streams.begin(3, only_first=True, **({"seed": 1} if case == "a field" else {}))
    if case == "no journal here":
        for exchange in site.wire.exchanges:
            exchange.sent_text = None  # type: ignore[attr-defined]
    if case == "its engine has completed it":  # only failures need the tokens then
        site.fleet.roster.stream_tokens = lambda *found: None if found[-1] == inf else [0]
    if case == "no journal elsewhere":
        site.worker("w1").reports_prefixes = False
    assert await drain(site, "w0", 0.2) == REMAINING[case]
    await streams.end()


async def test_a_sweep_moves_a_few(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MAX_MOVES_PER_SWEEP", 2)
    streams = await paced(start)
    await streams.begin(9, only_first=True)
    wire = streams.site.wire
    wire.ticks.stop()  # a busy machine would sweep again meanwhile
    assert await drain(streams.site, "w0", 0.0) == (0, {WAITS: 9})
    wire.moves.step(wire.clock() + 1)
    assert streams.site.worker("w1").requests == 2
    wire.ticks.start()
    await eventually(lambda: streams.site.worker("w1").requests == 9)
    await streams.end()


async def test_a_request_that_ends_before_its_turn_is_not_sent_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MAX_MOVES_PER_SWEEP", 1)
    site = await start(*TWO, router=NO_RETRIES)
    site.fleet.roster.drain("w1")
    gate = site.hold()
    clients = [await site.send(chat()) for _ in range(4)]
    await eventually(lambda: len(site.served()) == 4)
    site.fleet.roster.drain("w1", draining=False)
    site.wire.ticks.stop()
    assert await drain(site, "w0", 0.0) == (1, {WAITS: 3})
    clients.pop().close()
    gate.set()
    for client in clients:
        assert (await client.answer()).status == 200
    await eventually(lambda: not site.wire.exchanges)
    for _ in range(3):
        site.wire.moves.step(site.wire.clock())
    assert len(site.served()) == 5
    site.wire.ticks.start()
    await site.settled()


async def test_streams_that_end_meanwhile_do_not_remain(start: Start) -> None:
    streams = await paced(start)
    await streams.begin(3, only_first=True)
    streams.site.worker("w1").reports_prefixes = False
    moving = asyncio.create_task(drain(streams.site, "w0", 60.0))
    await streams.site.swept()
    await streams.end()
    assert await moving == (0, {})


async def test_a_worker_that_is_used_again_keeps_its_streams(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MAX_MOVES_PER_SWEEP", 1)
    streams = await paced(start)
    site = streams.site
    await streams.begin(5, only_first=True)
    site.wire.ticks.stop()
    await drain(site, "w0", 0.0)
    site.wire.moves.step(site.wire.clock() + 1)  # moves a stream, and holds the next one
    site.fleet.roster.drain("w0", draining=False)
    site.wire.ticks.start()
    await site.swept()
    await site.swept()
    assert site.worker("w0").requests == 4
    await streams.end()


async def test_a_sampled_stream_moves_with_the_last_tokens_of_a_late_journal(start: Start) -> None:
    """Another worker would sample other ones, and the stream would end with an error."""
    streams = await paced(start)
    site, engines = streams.site, streams.engines
    await streams.begin(3, only_first=True, temperature=0.8)
    published = {key: [*tokens] for key, tokens in engines.published.items()}
    for tokens in engines.published.values():
        del tokens[2:]
    site.wire.ticks.stop()
    moving = asyncio.create_task(drain(site, "w0"))
    await eventually(lambda: bool(site.worker("w0").draining))
    engines.published.update(published)
    site.wire.ticks.start()
    assert await moving == (3, {})
    await eventually(lambda: len(engines.asked) == 6)
    so_far = [each["vllm_xargs"]["output_so_far"] for each in engines.asked[3:]]
    assert so_far == [[0, 1, 2, 3]] * 3
    await streams.end()

"""Streams of failed workers that wait until another worker can continue them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.core.fleet.leases import PAUSE_S
from proxy.core.lifecycle.retries import MIN_RESERVE, RESERVE_PER_S
from proxy.core.request.continuable import NO_WORKER
from proxy.wire.exchange.continuation import RECOVERED_S
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.engines import TWO, Engines, check_broken, in_turn, journaled
from tests.proxy.wire.exchange.test_continuation import ENGINE_DIED
from tests.proxy.wire.fake_worker import Script
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import Fake, Site, eventually

LOADING = scripts.error(503, "loading", (b"retry-after", b"3"))


class Stream:
    """A stream that has three words, and stalls."""

    def __init__(self, site: Site, engines: Engines, client: Client) -> None:
        self.site, self.engines, self.client = site, engines, client
        [call] = site.served()
        self.busy = call.connection.worker.name
        self.other = "w1" if self.busy == "w0" else "w0"

    def cut(self) -> None:
        """End the stream's connection."""
        self.site.served()[0].reset()

    def lose(self) -> None:
        """End the stream's worker, which does not come back."""
        self.site.fleet.roster.drain(self.busy)
        self.cut()

    async def goes_on(self, continuations: int = 1) -> None:
        await goes_on(self.site, self.engines, self.client, continuations)

    async def is_lost(self, why: bytes = b"") -> None:
        await check_broken(self.client, why)
        assert self.site.metrics.lost_streams == {NO_WORKER: 1}
        await self.site.settled()


async def begin(
    start: Start, *fakes: Fake, later: tuple[Script, ...] = (), **router: Any
) -> Stream:
    """Start a stream; later calls get these scripts, then the rest of the stream."""
    site, engines = await journaled(start, *fakes, router=router)
    in_turn(site, engines.serve(dies_after=3, end="stall"), *later, engines.serve())
    client = await site.send(engines.request())
    await eventually(lambda: any(len(found) == 3 for found in engines.published.values()))
    return Stream(site, engines, client)


async def waits(site: Site) -> None:
    await eventually(lambda: len(site.router.queue) == 1)
    await site.swept()
    assert len(site.router.queue) == 1


async def goes_on(site: Site, engines: Engines, client: Client, continuations: int = 1) -> None:
    engines.check(await client.answer())
    assert sum(site.metrics.continuations.values()) == continuations
    assert site.metrics.lost_streams == {}
    await site.settled()


def open_breaker(site: Site, name: str) -> None:
    site.fleet.health.record_failure(site.worker(name), site.clock(), 5.0)


# How the other worker can't continue the stream at first, and how it can later.
Change = Callable[[Site, str], None]
BARRIERS: dict[str, tuple[Change, Change]] = {
    "its breaker is open": (open_breaker, lambda site, _: site.skip(5.0)),
    "it is down": (Site.down, Site.up),
}


@pytest.mark.parametrize("barrier", BARRIERS)
async def test_for_a_worker_that_takes_no_requests(start: Start, barrier: str) -> None:
    stream = await begin(start, panic_threshold=0.0)
    raise_barrier, remove_barrier = BARRIERS[barrier]
    raise_barrier(stream.site, stream.other)
    stream.lose()
    await waits(stream.site)
    remove_barrier(stream.site, stream.other)
    await stream.goes_on()


async def test_for_a_worker_that_accepts_no_connections_yet(start: Start) -> None:
    """That is no attempt: the request has not reached it."""
    stream = await begin(start, max_attempts=2)
    spare = stream.site.fakes[stream.other]
    await spare.refuse()
    stream.lose()
    for _ in range(3):
        await waits(stream.site)
        stream.site.skip(PAUSE_S)
    await waits(stream.site)
    await spare.listen()
    stream.site.skip(PAUSE_S)
    await stream.goes_on()


async def test_for_a_worker_that_is_busy(start: Start) -> None:
    stream = await begin(start, later=(LOADING,), max_attempts=2)
    stream.lose()
    await waits(stream.site)
    stream.site.skip(3.0)
    await stream.goes_on()


async def test_for_a_slot(start: Start) -> None:
    gate = asyncio.Event()
    blocker = scripts.gated(gate, scripts.answer())
    full = Fake("w0", max_requests=1), Fake("w1", max_requests=1)
    stream = await begin(start, *full, later=(blocker,))
    blocking = await stream.site.send(chat("other"))
    await eventually(lambda: len(stream.site.served()) == 2)
    stream.lose()
    await waits(stream.site)
    gate.set()
    assert (await blocking.answer()).status == 200
    await stream.goes_on()


async def test_for_the_retry_budget(start: Start) -> None:
    stream = await begin(start)
    site = stream.site
    site.stand_still()
    while site.router._retries.spend(site.clock()):
        pass
    stream.lose()
    await waits(site)
    site.skip(1 / RESERVE_PER_S)
    await stream.goes_on()
    assert not site.router._retries.has_retry(site.clock())


@pytest.mark.parametrize(
    ("fakes", "later"),
    [
        ((Fake("w0"),), ()),  # only the connection may have failed
        # The second worker fails before the client gets a token from it.
        (TWO, (scripts.raw(scripts.STREAM_HEAD, end="reset"),)),
    ],
    ids=["its own", "both"],
)
async def test_for_workers_that_have_failed_it(
    start: Start, fakes: tuple[Fake, ...], later: tuple[Script, ...]
) -> None:
    stream = await begin(start, *fakes, later=later)
    stream.cut()
    await waits(stream.site)
    assert len(stream.site.served()) == len(fakes)
    stream.site.skip(PAUSE_S)
    await stream.goes_on()


@pytest.mark.parametrize("missing", ["retry_budget", "queue_requests"])
async def test_not_without_a_retry_budget_or_a_queue(start: Start, missing: str) -> None:
    stream = await begin(start, **{missing: 0})
    if missing == "queue_requests":
        stream.site.down(stream.other)
    stream.lose()
    await stream.is_lost()


async def test_no_longer_than_a_request_may_wait(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await begin(start, queue_wait_s=7.0)
    for name in stream.site.fakes:
        stream.site.down(name)
    stream.cut()
    await waits(stream.site)
    stream.site.skip(7.0)
    await stream.is_lost(b"stayed busy for the 7 s")
    assert "is not continued: no_worker 'Every worker stayed busy" in caplog.text


async def test_no_longer_in_several_waits(start: Start) -> None:
    stream = await begin(start, Fake("w0"), later=(LOADING,) * 3, queue_wait_s=7.0)
    stream.cut()
    for seconds in (PAUSE_S, 3.0, 3.1):
        await waits(stream.site)
        stream.site.skip(seconds)
    await stream.is_lost(b"continued it in 7 s")


@pytest.mark.parametrize("words", [0, 2])
async def test_only_if_the_engine_failed_after_the_first_text(start: Start, words: int) -> None:
    """Before it, the request may be at fault, and its client can send it again."""
    site, engines = await journaled(start)
    site.down("w1")
    in_turn(site, engines.fail(words, ENGINE_DIED), engines.serve())
    client = await site.send(engines.request())
    if not words:
        assert b"EngineCore encountered an issue" in (await client.answer()).body
        assert site.metrics.lost_streams == {NO_WORKER: 1}
        await site.settled()
        return
    await waits(site)
    site.up("w1")
    await goes_on(site, engines, client)


async def test_a_silent_stream_has_its_attempts_again_too(start: Start) -> None:
    site, engines = await journaled(start, router={"max_attempts": 2})
    gate = asyncio.Event()
    hangs = engines.serve(dies_after=2, end="stall", pause=gate)
    in_turn(site, engines.serve(dies_after=3), hangs, engines.serve())
    client = await site.send(engines.request())
    await eventually(lambda: sum(site.metrics.continuations.values()) == 1)
    site.skip(RECOVERED_S)
    gate.set()
    await eventually(lambda: any(len(found) == 5 for found in engines.published.values()))
    await site.swept()
    site.down(site.served()[-1].connection.worker.name)
    await site.swept()
    for _ in range(2):
        await site.pass_time(11.0)
    await goes_on(site, engines, client, 2)


async def test_a_client_that_leaves_ends_the_wait(start: Start) -> None:
    stream = await begin(start)
    stream.site.down(stream.other)
    stream.lose()
    await waits(stream.site)
    stream.client.close()
    await stream.site.settled()
    assert stream.site.metrics.lost_streams == {}


@pytest.mark.parametrize("ran_s", [RECOVERED_S, RECOVERED_S / 2])
async def test_a_stream_that_ran_for_a_while_has_all_its_attempts(
    start: Start, caplog: pytest.LogCaptureFixture, ran_s: float
) -> None:
    site, engines = await journaled(start)
    site.stand_still()
    gates = [asyncio.Event() for _ in range(4)]
    in_turn(site, *(engines.serve(dies_after=2, pause=gate) for gate in gates), engines.serve())
    client = await site.send(engines.request())
    for number, gate in enumerate(gates):
        words = 2 * number + 1
        await eventually(
            lambda words=words: (
                any(len(t) == words for t in engines.published.values())
                or NO_WORKER in site.metrics.lost_streams
            )
        )
        await site.swept()
        site.skip(ran_s)
        gate.set()
    if ran_s < RECOVERED_S:
        await check_broken(client)
        assert "it has used all its attempts" in caplog.text
        assert len(engines.asked) == 3
    else:
        await goes_on(site, engines, client, len(gates))


async def test_a_fleet_that_fails_as_a_whole_is_not_loaded_twice(start: Start) -> None:
    """The streams of one worker are spared; those of the other one wait for the budget."""
    site, engines = await journaled(start)
    site.always(engines.serve(dies_after=3, end="stall"))
    site.stand_still()
    clients = [await site.send(engines.request()) for _ in range(60)]
    await eventually(lambda: sum(len(t) == 3 for t in engines.published.values()) == 60)
    spared = max(len(fake.served) for fake in site.fakes.values())
    site.always(engines.serve())
    for fake in site.fakes.values():
        await fake.refuse()
    for fake in site.fakes.values():
        await fake.die()
    for _ in range(5):
        await site.pass_time(PAUSE_S)
    for fake in site.fakes.values():
        await fake.listen()
    for _ in range(5):
        await site.pass_time(PAUSE_S)
    site.skip(30.0)
    answers = await asyncio.gather(*(client.answer() for client in clients))
    whole = sum(b"[DONE]" in answer.body[-20:] for answer in answers)
    again = len(engines.asked) - 60
    budget = max(MIN_RESERVE, site.router.settings.retry_budget * 60) + RESERVE_PER_S * site.skipped
    assert spared < whole == again <= spared + budget
    assert site.metrics.lost_streams == {NO_WORKER: 60 - whole}

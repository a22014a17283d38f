"""Streams of failed workers that wait until another worker can continue them."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.fleet.leases import PAUSE_S
from proxy.core.lifecycle.retries import MIN_RESERVE, RESERVE_PER_S
from proxy.core.request.continuable import NO_WORKER
from proxy.wire.exchange.continuation import RECOVERED_S
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.test_continuation import (
    ENGINE_DIED,
    WORDS,
    Engines,
    failing,
    in_turn,
    text_of,
    with_journals,
)
from tests.proxy.wire.fake_worker import Script
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import Fake, Site, eventually

TWO = Fake("w0"), Fake("w1")


async def begin(site: Site, engines: Engines, *later: Script) -> tuple[Client, str]:
    """Return a stream with three words, and the worker that serves it."""
    in_turn(site, engines.serve(dies_after=3, end="stall"), *later)
    client = await site.send(chat(stream=True))
    await eventually(lambda: any(len(found) == 3 for found in engines.published.values()))
    [call] = site.served()
    return client, call.connection.worker.name


def lose(site: Site, name: str) -> None:
    """Kill a worker that does not come back."""
    site.fleet.roster.drain(name)
    site.served()[0].reset()


def other(name: str) -> str:
    return "w1" if name == "w0" else "w0"


async def waits(site: Site) -> None:
    await eventually(lambda: len(site.router.queue) == 1)
    await site.swept()
    assert len(site.router.queue) == 1


async def goes_on(site: Site, client: Client, continuations: int = 1) -> None:
    assert (await text_of(client))[0] == "".join(WORDS)
    assert sum(site.metrics.continuations.values()) == continuations
    assert site.metrics.lost_streams == {}
    await site.settled()


async def test_for_a_worker_whose_breaker_is_open(start: Start) -> None:
    site = await start(*TWO, router={"panic_threshold": 0.0})
    engines = Engines()
    with_journals(site, engines)
    client, busy = await begin(site, engines, engines.serve())
    site.fleet.health.record_failure(site.worker(other(busy)), site.clock(), 5.0)
    lose(site, busy)
    await waits(site)
    site.skip(5.0)
    await goes_on(site, client)


async def test_for_a_worker_that_is_down(start: Start) -> None:
    site = await start(*TWO)
    engines = Engines()
    with_journals(site, engines)
    client, busy = await begin(site, engines, engines.serve())
    site.down(other(busy))
    lose(site, busy)
    await waits(site)
    site.up(other(busy))
    await goes_on(site, client)


async def test_for_a_worker_that_accepts_no_connections_yet(start: Start) -> None:
    """That is no attempt: the request has not reached it."""
    site = await start(*TWO, router={"max_attempts": 2})
    engines = Engines()
    with_journals(site, engines)
    client, busy = await begin(site, engines, engines.serve())
    spare = site.fakes[other(busy)]
    await spare.refuse()
    lose(site, busy)
    for _ in range(3):
        await waits(site)
        site.skip(PAUSE_S)
    await waits(site)
    await spare.listen()
    site.skip(PAUSE_S)
    await goes_on(site, client)


async def test_for_a_worker_that_is_busy(start: Start) -> None:
    site = await start(*TWO, router={"max_attempts": 2})
    engines = Engines()
    with_journals(site, engines)
    loading = scripts.error(503, "loading", (b"retry-after", b"3"))
    client, busy = await begin(site, engines, loading, engines.serve())
    lose(site, busy)
    await waits(site)
    site.skip(3.0)
    await goes_on(site, client)


async def test_for_a_slot(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1), Fake("w1", max_requests=1))
    engines = Engines()
    with_journals(site, engines)
    gate = asyncio.Event()
    blocker = scripts.gated(gate, scripts.answer())
    client, busy = await begin(site, engines, blocker, engines.serve())
    blocking = await site.send(chat("other"))
    await eventually(lambda: len(site.served()) == 2)
    lose(site, busy)
    await waits(site)
    gate.set()
    assert (await blocking.answer()).status == 200
    await goes_on(site, client)


async def test_for_the_retry_budget(start: Start) -> None:
    site = await start(*TWO)
    site.stand_still()
    engines = Engines()
    with_journals(site, engines)
    client, busy = await begin(site, engines, engines.serve())
    while site.router._retries.spend(site.clock()):
        pass
    lose(site, busy)
    await waits(site)
    site.skip(1 / RESERVE_PER_S)
    await goes_on(site, client)
    assert not site.router._retries.has_retry(site.clock())


async def test_not_without_a_retry_budget(start: Start) -> None:
    site = await start(*TWO, router={"retry_budget": 0.0})
    engines = Engines()
    with_journals(site, engines)
    client, busy = await begin(site, engines)
    lose(site, busy)
    assert b'"error"' in (await client.answer()).body.split(b"\n\n")[-2]
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    await site.settled()


async def test_for_its_own_worker(start: Start) -> None:
    """Only the connection may have failed."""
    site = await start(Fake("w0"))
    engines = Engines()
    with_journals(site, engines)
    client, _ = await begin(site, engines, engines.serve())
    site.served()[0].reset()
    await waits(site)
    site.skip(PAUSE_S)
    await goes_on(site, client)


async def test_for_workers_that_have_both_failed_it(start: Start) -> None:
    """The second one fails before the client gets a token from it."""
    site = await start(*TWO)
    engines = Engines()
    with_journals(site, engines)
    early = scripts.raw(scripts.STREAM_HEAD, end="reset")
    client, _ = await begin(site, engines, early, engines.serve())
    site.served()[0].reset()
    await waits(site)
    assert len(site.served()) == 2
    site.skip(PAUSE_S)
    await goes_on(site, client)


async def test_no_longer_than_a_request_may_wait(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    site = await start(*TWO, router={"queue_wait_s": 7.0})
    engines = Engines()
    with_journals(site, engines)
    client, _ = await begin(site, engines)
    for name in site.fakes:
        site.down(name)
    site.served()[0].reset()
    await waits(site)
    site.skip(7.0)
    answer = await client.answer()
    assert b"stayed busy for the 7 s" in answer.body.split(b"\n\n")[-2]
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    assert "is not continued: no_worker 'Every worker stayed busy" in caplog.text
    await site.settled()


async def test_no_longer_in_several_waits(start: Start) -> None:
    site = await start(Fake("w0"), router={"queue_wait_s": 7.0})
    engines = Engines()
    with_journals(site, engines)
    loading = scripts.error(503, "loading", (b"retry-after", b"3"))
    client, _ = await begin(site, engines, *[loading] * 3)
    site.served()[0].reset()
    for seconds in (PAUSE_S, 3.0, 3.1):
        await waits(site)
        site.skip(seconds)
    assert b"continued it in 7 s" in (await client.answer()).body.split(b"\n\n")[-2]
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    await site.settled()


async def test_not_if_the_engine_failed_before_the_first_text(start: Start) -> None:
    """Then the request may be at fault, and its client can send it again."""
    site = await start(*TWO)
    engines = Engines()
    with_journals(site, engines)
    site.down("w1")
    in_turn(site, failing(engines, ENGINE_DIED, 0))
    answer = await (await site.send(chat(stream=True))).answer()
    assert b"EngineCore encountered an issue" in answer.body
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    await site.settled()


async def test_for_a_worker_that_is_down_after_the_engine_failed(start: Start) -> None:
    site = await start(*TWO)
    engines = Engines()
    with_journals(site, engines)
    site.down("w1")
    in_turn(site, failing(engines, ENGINE_DIED, 2), engines.serve())
    client = await site.send(chat(stream=True))
    await waits(site)
    site.up("w1")
    await goes_on(site, client)


async def test_a_silent_stream_has_its_attempts_again_too(start: Start) -> None:
    site = await start(*TWO, router={"max_attempts": 2})
    engines, gate = Engines(), asyncio.Event()
    with_journals(site, engines)
    hangs = engines.serve(dies_after=2, end="stall", pause=gate)
    in_turn(site, engines.serve(dies_after=3), hangs, engines.serve())
    client = await site.send(chat(stream=True))
    await eventually(lambda: sum(site.metrics.continuations.values()) == 1)
    site.skip(RECOVERED_S)
    gate.set()
    await eventually(lambda: any(len(found) == 5 for found in engines.published.values()))
    await site.swept()
    site.down(site.served()[-1].connection.worker.name)
    await site.swept()
    for _ in range(2):
        site.skip(11.0)
        await site.swept()
    await goes_on(site, client, 2)


async def test_not_without_a_queue(start: Start) -> None:
    site = await start(*TWO, router={"queue_requests": 0})
    engines = Engines()
    with_journals(site, engines)
    client, busy = await begin(site, engines)
    site.down(other(busy))
    site.served()[0].reset()
    assert b'"error"' in (await client.answer()).body.split(b"\n\n")[-2]
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    await site.settled()


async def test_a_client_that_leaves_ends_the_wait(start: Start) -> None:
    site = await start(*TWO)
    engines = Engines()
    with_journals(site, engines)
    client, busy = await begin(site, engines)
    site.down(other(busy))
    lose(site, busy)
    await waits(site)
    client.close()
    await site.settled()
    assert site.metrics.lost_streams == {}


@pytest.mark.parametrize("ran_s", [RECOVERED_S, RECOVERED_S / 2])
async def test_a_stream_that_ran_for_a_while_has_all_its_attempts(
    start: Start, caplog: pytest.LogCaptureFixture, ran_s: float
) -> None:
    site = await start(*TWO)
    site.stand_still()
    engines = Engines()
    with_journals(site, engines)
    deaths = 4

    def dies() -> Script:
        gate = asyncio.Event()
        gates.append(gate)
        return engines.serve(dies_after=2, end="reset", pause=gate)

    gates: list[asyncio.Event] = []
    in_turn(site, *(dies() for _ in range(deaths)), engines.serve())
    client = await site.send(chat(stream=True))
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
        assert b'"error"' in (await client.answer()).body.split(b"\n\n")[-2]
        assert "it has used all its attempts" in caplog.text
        assert len(engines.asked) == 3
    else:
        await goes_on(site, client, deaths)
    await site.settled()


async def test_a_fleet_that_fails_as_a_whole_is_not_loaded_twice(start: Start) -> None:
    """The streams of one worker are spared; those of the other one wait for the budget."""
    site = await start(*TWO)
    engines = Engines()
    with_journals(site, engines)
    site.always(engines.serve(dies_after=3, end="stall"))
    site.stand_still()
    clients = [await site.send(chat(stream=True)) for _ in range(60)]
    await eventually(lambda: sum(len(t) == 3 for t in engines.published.values()) == 60)
    spared = max(len(fake.served) for fake in site.fakes.values())
    site.always(engines.serve())
    for fake in site.fakes.values():
        await fake.refuse()
    for fake in site.fakes.values():
        await fake.die()
    for _ in range(5):
        site.skip(PAUSE_S)
        await site.swept()
    for fake in site.fakes.values():
        await fake.listen()
    for _ in range(5):
        site.skip(PAUSE_S)
        await site.swept()
    site.skip(30.0)
    answers = await asyncio.gather(*(client.answer() for client in clients))
    whole = sum(b"[DONE]" in answer.body[-20:] for answer in answers)
    again = len(engines.asked) - 60
    budget = max(MIN_RESERVE, site.router.settings.retry_budget * 60) + RESERVE_PER_S * site.skipped
    assert spared < whole == again <= spared + budget
    assert site.metrics.lost_streams == {NO_WORKER: 60 - whole}
    await site.settled()

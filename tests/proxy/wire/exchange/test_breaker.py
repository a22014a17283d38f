"""A worker that fails is left alone for a while, and for as long as it asks."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy.health.breaker_log import TROUBLES, BreakerLog
from proxy.health.worker_state import why_not
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, Site, eventually

TURNS = {"policy": "round_robin"}


async def two(start: Start, script: Script) -> Site:
    """Start two workers, of which the first is ill."""
    site = await start(Fake("w0"), Fake("w1"), router=TURNS)
    site.fakes["w0"].always(script)
    site.stand_still()
    return site


async def ask(site: Site, times: int) -> int:
    """Ask so often; return how often the ill one was asked."""
    before = len(site.fakes["w0"].served)
    for _ in range(times):
        assert (await site.ask(chat())).status == 200
    return len(site.fakes["w0"].served) - before


@pytest.mark.parametrize(
    ("script", "times"),
    [
        *((scripts.error(status), 3) for status in (500, 502, 504)),
        *((end, 3) for end in (scripts.reset, scripts.hang_up)),
        *((scripts.error(status), 1) for status in (429, 503)),  # a worker that says it is busy
    ],
)
async def test_a_failing_worker_is_left_alone(start: Start, script: Script, times: int) -> None:
    site = await two(start, script)
    assert await ask(site, 20) == times


ILL: dict[str, tuple[Script, str]] = {
    "502": (scripts.error(502), "it returned 502"),
    "429": (scripts.error(429), "it returned 429"),
    "500, which the other has not": (scripts.error(500), "it returned 500"),
    "closed": (scripts.hang_up, TROUBLES["reset"]),
    "stalled": (scripts.stall, TROUBLES["timeout"]),
    "no HTTP": (scripts.raw(b"SSH-2.0-x\r\n"), TROUBLES["broken"]),
    "cut": (
        scripts.raw(scripts.STREAM_HEAD + scripts.chunk(scripts.token("a")), end="reset"),
        TROUBLES["reset"],
    ),
}


@pytest.mark.parametrize("name", ILL)
async def test_it_is_said_once_why_and_when_it_is_over(
    start: Start, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, why = ILL[name]
    caplog.set_level(logging.INFO)
    site = await start(Fake("w0"), Fake("w1"), router=TURNS, wire={"first_byte_s": 0.2})
    site.fleet.roster.ejections.listener = BreakerLog()
    site.fakes["w0"].always(script)
    site.stand_still()

    async def many() -> None:
        for _ in range(8):
            asking = asyncio.create_task(site.ask(chat(stream=True)))
            while not (await asyncio.wait([asking], timeout=0.01))[0]:
                site.skip(0.01)
            assert (await asking).status == 200

    await many()
    assert why_not(site.worker(), site.clock()).startswith(f"{why}; ")
    site.fakes["w0"].always(scripts.answer())
    site.skip(30.0)
    await many()
    assert why_not(site.worker(), site.clock()) == ""
    said = [(each.levelname, each.getMessage()) for each in caplog.records]
    [(warning, began), (info, ended)] = said
    assert (warning, info) == ("INFO" if name == "429" else "WARNING", "INFO")
    assert began.startswith("worker w0 gets no requests for ")
    assert began.endswith(f" s: {why}")
    assert ended == "worker w0 responds, and gets requests again"


async def test_a_refused_connection_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    site = await start(Fake("w0"), Fake("w1"), router=TURNS)
    site.fleet.roster.ejections.listener = BreakerLog()
    await site.fakes["w0"].refuse()
    site.stand_still()
    await ask(site, 10)
    [said] = [each.getMessage() for each in caplog.records]
    assert said == f"worker w0 gets no requests for 0.5 s: {TROUBLES['connect']}"


@pytest.mark.parametrize("status", [429, 503])
async def test_its_retry_after_is_honoured(start: Start, status: int) -> None:
    site = await two(start, scripts.error(status, "busy", (b"Retry-After", b"30")))
    assert await ask(site, 6) == 1
    site.skip(28)
    assert await ask(site, 6) == 0
    site.skip(4)
    site.fakes["w0"].always(scripts.answer())
    assert await ask(site, 6) >= 2


async def test_one_request_goes_on_trial_and_no_more(start: Start) -> None:
    site = await two(start, scripts.error(500))
    await ask(site, 10)
    gate = site.fakes["w0"].hold()
    site.skip(1.0)
    tried = len(site.fakes["w0"].served)
    asking = [asyncio.create_task(site.ask(chat())) for _ in range(20)]
    await eventually(lambda: sum(task.done() for task in asking) == 19)
    assert len(site.fakes["w0"].served) == tried + 1
    gate.set()
    await asyncio.gather(*asking)
    assert await ask(site, 10) >= 4


async def test_a_trial_whose_client_leaves_is_held_again(start: Start) -> None:
    site = await two(start, scripts.error(500))
    await ask(site, 10)
    site.fakes["w0"].always(scripts.stall)
    site.skip(1.0)
    tried = len(site.fakes["w0"].served)
    clients = [await site.client() for _ in range(2)]
    for client in clients:
        await client.send(chat())
    await site.fakes["w0"].got(tried + 1)
    for client in clients:
        client.close()
    await site.settled()
    site.fakes["w0"].always(scripts.answer())
    assert await ask(site, 10) >= 4


async def test_4xx_does_not_open_it(start: Start) -> None:
    site = await two(start, scripts.error(400))
    site.fakes["w1"].always(scripts.error(400))
    for _ in range(10):
        assert (await site.ask(chat())).status == 400
    assert len(site.fakes["w0"].served) == 5


async def test_a_request_no_worker_survives_is_held_against_none(start: Start) -> None:
    """Or whoever sends such requests has every worker shut to everybody else."""

    async def judge(call: Call) -> None:
        script = scripts.error(500) if b"poison" in call.body else scripts.answer()
        await script(call)

    site = await two(start, judge)
    site.fakes["w1"].always(judge)
    for _ in range(8):
        assert (await site.ask(chat("poison"))).status == 500
        assert (await site.ask(chat())).status == 200
    assert all(worker.breaker.has_no_failures for worker in site.fleet.roster)


async def test_the_only_worker_is_not_shut_for_a_500(start: Start) -> None:
    site = await start(Fake("w0"))
    site.fake.then(*[scripts.error(500)] * 5)
    assert [(await site.ask(chat())).status for _ in range(6)] == [500] * 5 + [200]


async def test_with_all_open_it_is_503_and_told_how_long(start: Start) -> None:
    site = await start(Fake("w0"), router={**TURNS, "panic_threshold": 0.0})
    site.fake.always(scripts.error(502))
    for _ in range(3):
        assert (await site.ask(chat())).status == 502
    answer = await site.ask(chat())
    assert answer.status == 503
    answer.error()
    assert int(answer.one(b"retry-after")) >= 1
    assert len(site.fake.served) == 3

"""The breaker: a failing worker gets no requests for a while."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy.core.fleet.breaker import FAILURES_TO_OPEN
from proxy.health.breaker_log import TROUBLES, BreakerLog
from proxy.health.worker_state import why_not
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, Site, eventually

ROUND_ROBIN = {"policy": "round_robin"}


async def start_failing(start: Start, script: Script) -> Site:
    """Start two workers, of which the first fails."""
    site = await start(Fake("w0"), Fake("w1"), router=ROUND_ROBIN)
    site.fakes["w0"].always(script)
    site.stand_still()
    return site


async def send_requests(site: Site, times: int) -> int:
    """Send requests one by one; return how many went to the failing worker."""
    before = len(site.fakes["w0"].served)
    for _ in range(times):
        assert (await site.ask(chat())).status == 200
    return len(site.fakes["w0"].served) - before


# The script of a failing worker (None: it refuses connections), how many requests it gets before
# its breaker opens, and the logged reason.
FAILURES: dict[str, tuple[Script | None, int, str]] = {
    "500 of one worker only": (scripts.error(500), 3, "it returned 500"),
    "502": (scripts.error(502), 3, "it returned 502"),
    "429": (scripts.error(429), 1, "it returned 429"),  # the worker is busy
    "503": (scripts.error(503), 1, "it returned 503"),
    "closed": (scripts.hang_up, 3, TROUBLES["reset"]),
    "stalled": (scripts.stall, 3, TROUBLES["timeout"]),
    "no HTTP": (scripts.raw(b"SSH-2.0-x\r\n"), 3, TROUBLES["broken"]),
    "cut": (
        scripts.raw(scripts.STREAM_HEAD + scripts.chunk(scripts.token("a")), end="reset"),
        3,
        TROUBLES["reset"],
    ),
    "refused": (None, 0, TROUBLES["connect"]),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_failing_worker_gets_no_requests_until_its_breaker_closes(
    start: Start, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, times, why = FAILURES[name]
    caplog.set_level(logging.INFO)
    site = await start(Fake("w0"), Fake("w1"), router=ROUND_ROBIN, wire={"first_byte_s": 0.2})
    site.fleet.roster.ejections.listener = BreakerLog()
    failing = site.fakes["w0"]
    if script is None:
        await failing.refuse()
    else:
        failing.always(script)
    site.stand_still()

    async def send_ten() -> None:
        for _ in range(10):
            asking = asyncio.create_task(site.ask(chat(stream=True)))
            while not (await asyncio.wait([asking], timeout=0.01))[0]:
                site.skip(0.01)
            assert (await asking).status == 200

    await send_ten()
    assert len(failing.served) == times
    assert why_not(site.worker(), site.clock()).startswith(f"{why}; ")
    failing.always(scripts.answer())
    if script is None:
        await failing.listen()
    site.skip(30.0)
    await send_ten()
    assert why_not(site.worker(), site.clock()) == ""
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    [(warning, began), (info, ended)] = messages
    assert (warning, info) == ("INFO" if times == 1 else "WARNING", "INFO")
    assert began.startswith("worker w0 gets no requests for ")
    assert began.endswith(f" s: {why}")
    assert ended == "worker w0 responds, and gets requests again"


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_of_the_worker_is_honoured(start: Start, status: int) -> None:
    site = await start_failing(start, scripts.error(status, "busy", (b"Retry-After", b"30")))
    assert await send_requests(site, 6) == 1
    site.skip(28)
    assert await send_requests(site, 6) == 0
    site.skip(4)
    site.fakes["w0"].always(scripts.answer())
    assert await send_requests(site, 6) >= 2


async def test_half_open_breaker_lets_one_request_through(start: Start) -> None:
    site = await start_failing(start, scripts.error(500))
    await send_requests(site, 10)
    gate = site.fakes["w0"].hold()
    site.skip(1.0)
    tried = len(site.fakes["w0"].served)
    asking = [asyncio.create_task(site.ask(chat())) for _ in range(20)]
    await eventually(lambda: sum(task.done() for task in asking) == 19)
    assert len(site.fakes["w0"].served) == tried + 1
    gate.set()
    await asyncio.gather(*asking)
    assert await send_requests(site, 10) >= 4


async def test_4xx_does_not_open_the_breaker(start: Start) -> None:
    site = await start_failing(start, scripts.error(400))
    site.fakes["w1"].always(scripts.error(400))
    for _ in range(10):
        assert (await site.ask(chat())).status == 400
    assert len(site.fakes["w0"].served) == 5


async def test_request_that_fails_everywhere_opens_no_breaker(start: Start) -> None:
    """Otherwise such requests would shut every worker for all other clients."""

    async def fail_on_poison(call: Call) -> None:
        script = scripts.error(500) if b"poison" in call.body else scripts.answer()
        await script(call)

    site = await start_failing(start, fail_on_poison)
    site.fakes["w1"].always(fail_on_poison)
    for _ in range(8):
        assert (await site.ask(chat("poison"))).status == 500
        assert (await site.ask(chat())).status == 200
    assert all(worker.breaker.has_no_failures for worker in site.fleet.roster)


async def test_worker_that_is_well_again_is_tried_though_others_have_the_cache(
    start: Start,
) -> None:
    """Requests one by one of one long beginning: `adaptive` prefers the worker that has it."""
    # Without a queue retries do not pause: the clock stands.
    site = await start(Fake("w0"), Fake("w1"), Fake("w2"), router={"queue_requests": 0})
    text = "the same beginning " * 500
    first = site.fakes["w0"]

    async def ask(times: int) -> int:
        """Send requests one by one; return how many went to the first worker."""
        before = len(first.served)
        for _ in range(times):
            assert (await site.ask(chat(text))).status == 200
        return len(first.served) - before

    for _ in range(FAILURES_TO_OPEN):
        site.fleet.health.record_failure(site.worker(), site.clock(), why="reset")
    site.stand_still()
    first.always(scripts.hang_up)
    assert await ask(20) == 0
    site.skip(1.0)
    assert await ask(20) == 1, "it still fails, and the request goes elsewhere"
    first.always(scripts.answer())
    site.skip(30.0)
    assert await ask(20) >= 1
    assert site.worker().breaker.closed

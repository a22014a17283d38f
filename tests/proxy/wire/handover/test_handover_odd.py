"""Malformed prefill responses, failing and hanging prefill workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.core.fleet.kv_links import FAILURES_TO_BAR
from proxy.health.worker_state import state
from proxy.wire.handover import prefill_leg
from proxy.wire.timeouts import prefill_timeout_s
from tests.proxy.metrics.scraped import scraped
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.kv import CHAT, OPENINGS, Faults
from tests.proxy.wire.pairs import Pairs, ask, chat_body, expected, pairs, words
from tests.proxy.wire.scripts import LAST_CHUNK, chunk

GOOD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "localhost",
    "remote_port": 5600,
    "tp_size": 1,
}


def respond_with(params: Any, framing: str = "length") -> Script:
    """Answer a prefill leg with these parameters."""
    body = {"id": "c", "choices": [], "usage": scripts.usage(9, 1), "kv_transfer_params": params}
    return scripts.answer(body=json.dumps(body).encode(), framing=framing)


MALFORMED: dict[str, Script] = {
    "no parameters": scripts.answer(body=b'{"choices": []}'),
    "null": respond_with(None),
    "text": respond_with("do_remote_prefill"),
    "a list": respond_with([GOOD]),
    "nothing": respond_with({}),
    "no host": respond_with({k: v for k, v in GOOD.items() if k != "remote_host"}),
    "no id": respond_with(GOOD | {"remote_request_id": None}),
    "no blocks": respond_with(GOOD | {"remote_block_ids": []}),
    "no blocks in a group": respond_with(GOOD | {"remote_block_ids": [[]]}),
    "null blocks": respond_with(GOOD | {"remote_block_ids": None}),
    "nothing to fetch": respond_with(GOOD | {"do_remote_prefill": False}),
    "no JSON": scripts.answer(body=b"ok"),
    "half of JSON": scripts.answer(body=b'{"kv_transfer_params": {"do_remote'),
    "JSON of another kind": scripts.answer(body=b"[1]"),
    "a stream": scripts.stream(3),
    "an empty body": scripts.answer(body=b""),
    "a body ended by closing": scripts.answer(body=b"{}", framing="close"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_parameters_are_not_used(here: Pairs, name: str) -> None:
    here.kv.inject("p0", Faults(before=MALFORMED[name]))
    body = chat_body(stream=True)
    await here.check_served(body)
    assert here.legs() == ["prefill p0", "whole d0"]
    assert here.site.fakes["d0"].served[0].body == body


async def test_oversized_prefill_response_is_broken(
    here: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_leg, "MAX_RESPONSE_BYTES", 10)
    endless = scripts.raw(scripts.head(200, (b"content-length", b"99")) + b"x" * 50, end="stall")
    here.kv.inject("p0", Faults(before=endless))
    await here.check_served()
    assert here.legs() == ["prefill p0", "whole d0"]


@pytest.mark.parametrize(
    "header", ["Accept-Encoding: gzip, deflate", "ACCEPT-ENCODING:br", "accept-encoding: "]
)
async def test_prefill_leg_accepts_no_compression(here: Pairs, header: str) -> None:
    """`kv.py` records a fault for a prefill leg that allows compression."""
    body, others = chat_body(), (b"X-Tail: kept", b"X-Accept-Encoding: theirs")
    await here.check_served(body, header.encode(), *others)
    assert here.legs() == ["prefill p0", "decode d0"]
    first, second = here.site.served()
    assert second.all(b"accept-encoding") == [header.partition(":")[2].strip().encode()]
    for call in (first, second):
        assert call.all(b"x-tail") == [b"kept"]
        assert call.all(b"x-accept-encoding") == [b"theirs"]


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_prefilled_twice_counts_as_no_transfer(here: Pairs, stream: bool) -> None:
    here.kv.inject("p0", Faults(before=MALFORMED["nothing"]))
    before = here.site.worker("d0").pace.steps
    assert (await ask(here, chat_body(stream=stream, max_tokens=9))).status == 200
    await here.settled()
    assert here.site.metrics.handovers.ends == {"prefilled_bare": 1}
    assert here.site.metrics.handovers.tokens == {}
    assert here.site.router.placer.transfer_times["tiny"].all.seen == 0
    if not stream:  # the share of the prefill is unknown
        assert here.site.worker("d0").pace.steps == before


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_parameters_reach_the_decode_worker_unchanged(here: Pairs, framing: str) -> None:
    params = GOOD | {
        "remote_block_ids": [[*range(2000)], [7]],
        "remote_blocks_expiry_time": None,
        "new in a later version": {"nested": [1.5, "ü", True, None]},
    }
    here.kv.inject("p0", Faults(before=respond_with(params, framing)))
    await ask(here, chat_body())
    [call] = here.site.fakes["d0"].served
    assert call.json()["kv_transfer_params"] == params
    assert here.kv.faults.pop() == f"d0: unknown parameters: {params}"


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_failed_prefill_leg_counts_as_no_attempt(start: Start, status: int) -> None:
    here = await pairs(start, max_attempts=1)
    here.kv.inject("prefill", *[Faults(before=scripts.error(status, "theirs"))] * 5)
    for _ in range(5):
        await here.check_served()
        for name in ("p0", "p1"):
            here.site.fleet.health.record_success(here.site.worker(name))
            here.site.router.placer.links.record_success(here.site.worker(name), None)
    assert here.kinds() == ["prefill", "whole"] * 5
    here.kv.inject("prefill", Faults(before=scripts.error(status, "theirs")))
    here.kv.inject("decode", Faults(before=scripts.error(503, "mine")))
    assert (await ask(here, chat_body())).status == 503  # the only attempt


async def test_broken_prefill_response_counts_blocks_as_left_to_expire(start: Start) -> None:
    """The missing part has their location."""
    here = await pairs(start)
    here.kv.inject("prefill", Faults(cut=(2, "reset")))
    await here.check_served()
    ends = here.site.metrics.handovers.ends
    assert (ends["prefill_failed"], ends["left_to_expire"]) == (1, 1)
    here.kv.inject("prefill", Faults(before=scripts.reset))
    assert (await ask(here, chat_body())).status == 200
    assert (ends["prefill_failed"], ends["left_to_expire"]) == (2, 1)  # no blocks were held


async def test_failed_transfers_bar_a_link(here: Pairs) -> None:
    """The decode worker answers 500 to the leg and serves the request whole."""
    for _ in range(FAILURES_TO_BAR):
        here.kv.inject("d0", Faults(during=scripts.error(500, "no blocks")))
        await here.check_served()
    assert here.site.metrics.handovers.bars == {("p0", "d0"): 1}
    assert here.kinds() == ["prefill", "decode", "whole"] * FAILURES_TO_BAR
    assert here.site.worker("d0").breaker.closed
    assert (await ask(here, chat_body())).status == 200
    assert here.legs()[-1] == "whole d0"


async def test_requests_that_fail_everywhere_bar_no_link(here: Pairs) -> None:
    """Otherwise a client could disable hand-overs for all others."""
    for _ in range(3 * FAILURES_TO_BAR):
        here.kv.inject("d0", *[Faults(during=scripts.error(500, "no"))] * 3)
        assert (await ask(here, chat_body())).status == 500
        here.kv.injected.clear()
    assert here.site.metrics.handovers.bars == {}
    await here.check_served()
    assert here.legs()[-1] == "decode d0"


@pytest.mark.parametrize("stream", [True, False])
async def test_prefill_worker_drains_until_its_blocks_are_read(here: Pairs, stream: bool) -> None:
    rest = here.hold("d0")
    body = chat_body(stream=stream)
    client = await here.send(body)
    await here.site.fakes["d0"].got(1)
    first = here.site.worker("p0")
    here.site.fleet.roster.drain("p0")
    assert (first.requests, first.unfetched_handovers, state(first)) == (0, 1, "draining")
    page = scraped(here.site.metrics)
    assert 'proxy_worker_held_prompts{worker="p0",role="prefill",model="tiny"} 1' in page
    rest.set()
    assert words(await client.answer()) == expected(body)
    await here.settled()
    assert (first.unfetched_handovers, state(first)) == (0, "drained")


# Too few workers


async def test_undelivered_decode_leg_is_resent_unchanged(here: Pairs) -> None:
    """The only decode worker closes an idle connection as the leg is sent."""
    assert (await ask(here, chat_body())).status == 200
    [kept] = here.site.fakes["d0"].open
    usual = here.kv.worker(here.site.fakes["p0"], "prefill")

    async def prefill(call: Call) -> None:
        await usual(call)
        kept.close_unread()  # the router reads the prefill's response first

    here.site.fakes["p0"].then(prefill)
    await here.check_served()
    assert here.legs()[2:] == ["prefill p0", "decode d0"]
    assert len(here.site.fakes["d0"].connections) == 2
    assert here.site.worker("d0").breaker.has_no_failures


async def test_worker_that_also_fails_whole_requests_bars_no_link(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=2)
    here.site.fleet.roster.drain("d1")

    async def fail_again(call: Call) -> None:
        here.site.fleet.roster.drain("d1", draining=False)
        await scripts.error(500)(call)

    leg, release, whole = Faults(during=scripts.error(500)), Faults(), Faults(during=fail_again)
    here.kv.inject("d0", leg, release, whole)
    await here.check_served()
    assert here.legs()[-2:] == ["whole d0", "whole d1"]
    assert not here.site.router.placer.links.has_failures


async def test_decode_error_passes_when_no_attempt_is_left(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1, max_attempts=1)
    error = scripts.event({"error": {"message": "no blocks", "code": 500}}) + scripts.DONE
    failed = scripts.raw(
        scripts.STREAM_HEAD, chunk(OPENINGS[CHAT]), chunk(error) + LAST_CHUNK, gap_s=0.02
    )
    here.kv.inject("d0", Faults(during=failed))
    assert (await ask(here, chat_body(stream=True))).body == OPENINGS[CHAT] + error


# A prefill worker that hangs


async def test_hung_prefill_leg_is_served_whole(start: Start) -> None:
    here = await pairs(start, prefills=1)
    await here.check_served()
    assert here.site.worker("p0").pace.prefills
    here.kv.inject("prefill", Faults(before=scripts.stall))
    body = chat_body(stream=True)
    asking = asyncio.create_task(ask(here, body))
    call = await here.site.fakes["p0"].got(2)
    here.site.skip(45.0)  # less than the timeout of a whole request
    assert words(await asking) == expected(body)
    await call.was_lost()
    assert here.site.metrics.handovers.ends["prefill_failed"] == 1
    assert here.kinds()[-2:] == ["prefill", "whole"]


async def test_prefill_timeout_grows_with_the_predicted_time(start: Start) -> None:
    here = await pairs(start, prefills=1)
    here.kv.inject("prefill", Faults(before=scripts.stall))
    client = await here.send(chat_body())
    await here.site.fakes["p0"].got(1)
    await here.site.pass_time(45.0)  # no time is predicted before the first measurement
    [exchange] = here.site.wire.exchanges
    lease = exchange._attempt.lease
    assert lease is not None
    assert lease.decision.handover is not None
    lease.decision.handover.prefill_s = 50.0
    assert prefill_timeout_s(lease, 20.0, 600.0) == 600.0
    here.site.worker("p0").pace.prefills = 1.0
    assert prefill_timeout_s(lease, 20.0, 600.0) == 20.0 + 4 * 50.0
    assert prefill_timeout_s(lease, 20.0, 30.0) == 30.0
    client.close()
    await here.settled()
    assert here.legs() == ["prefill p0"]

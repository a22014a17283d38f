"""Clients that leave during a hand-over: both legs end, and blocks are freed."""

from __future__ import annotations

import asyncio

import pytest

from proxy.wire.handover import release as module
from proxy.wire.handover.release import ABANDONED_GRACE_S
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import Pairs, chat_body, start_between_legs
from tests.proxy.wire.raw_client import DEADLINE_S
from tests.proxy.wire.site import eventually


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_leaving_during_the_prefill_ends_it(here: Pairs, way: str) -> None:
    here.kv.inject("p0", Faults(before=scripts.stall))
    client = await here.send(chat_body())
    call = await here.site.fakes["p0"].got(1)
    getattr(client, way)()
    await eventually(lambda: here.site.wire.releases)
    here.site.skip(ABANDONED_GRACE_S)  # the prefill might have ended
    await call.was_lost()
    await here.settled()
    assert here.legs() == ["prefill p0"]
    assert here.kv.pinned == []
    assert "left_to_expire" not in here.site.metrics.handovers.ends


@pytest.mark.parametrize("pieces", [0, 1, 2, 7])
async def test_leaving_during_the_prefill_response_releases_blocks(
    here: Pairs, pieces: int
) -> None:
    """The rest of the response has the parameters that free the blocks."""
    here.site.stand_still()  # the wait for the rest has a short timeout

    def cut(answer: bytes) -> int:
        head = answer.index(b"\r\n\r\n") + 4
        return head + (len(answer) - 600) * (pieces - 1) // 8 if pieces else 0

    rest = here.halve("p0", cut)
    client = await here.send(chat_body())
    await eventually(here.prefill_has_begun if pieces else lambda: here.kv.held)
    client.close()
    await eventually(lambda: not here.site.wire.exchanges)
    assert here.kv.ends() == [""]
    rest.set()
    await eventually(lambda: not here.kv.held)
    await here.settled()
    assert here.kv.ends() == ["released"]
    assert here.legs() == ["prefill p0", "release d0"]


async def test_leaving_ends_a_long_prefill_at_once(here: Pairs) -> None:
    here.kv.inject("p0", Faults(before=scripts.stall))
    pace = here.site.worker("p0").pace
    pace.prefills, pace.token_s = 1.0, 10.0
    client = await here.send(chat_body())
    call = await here.site.fakes["p0"].got(1)
    client.close()
    await eventually(lambda: not here.site.wire.exchanges)
    assert here.site.wire.releases == set()
    await call.was_lost()


async def test_refused_abandoned_prefill_releases_nothing(
    here: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABANDONED_GRACE_S", 60.0)
    refuse = here.site.fakes["p0"].hold_next(scripts.error(400, "no"))
    client = await here.send(chat_body())
    await here.site.fakes["p0"].got(1)
    client.close()
    await eventually(lambda: here.site.wire.releases)
    refuse.set()
    await here.settled()
    assert here.legs() == ["prefill p0"]


async def test_leaving_between_the_legs_releases_blocks(start: Start) -> None:
    here, client, victim = await start_between_legs(start)
    client.close()
    await eventually(lambda: not here.kv.held)
    await victim.wake()
    await here.settled()
    assert here.kv.ends() == ["released"]
    assert victim.served == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [False, True])
async def test_leaving_during_the_decode_ends_it(here: Pairs, stream: bool, begun: bool) -> None:
    here.kv.inject("d0", Faults(cut=(2, "stall")) if begun else Faults(during=scripts.stall))
    client = await here.send(chat_body(stream=stream))
    if begun and stream:
        await client.head()
    call = await here.site.fakes["d0"].got(1)
    client.reset()
    await call.was_lost()
    await here.settled()
    assert here.kv.ends() == ["read"]
    assert here.legs() == ["prefill p0", "decode d0"]


async def test_drain_releases_blocks_first(start: Start) -> None:
    here, client, victim = await start_between_legs(start)
    other = here.site.fakes["d1" if victim.name == "d0" else "d0"]
    usual = here.kv.worker(other, "decode")

    async def release_late(call: Call) -> None:
        await asyncio.sleep(0.2)
        await usual(call)

    other.then(release_late)
    here.site.router.draining = True
    draining = asyncio.create_task(here.site.wire.drain(0.0))
    assert (await client.answer()).status == 503
    client.close()
    await asyncio.wait_for(draining, DEADLINE_S)
    assert here.kv.ends() == ["released"]
    assert here.site.metrics.handovers.ends["released"] == 1
    await victim.wake()

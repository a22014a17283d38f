"""Blocks that nobody fetches."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.core.model.role import Role
from proxy.http.response_parser import ResponseHead
from proxy.transfer.types import Pair, PrefillResult, Side
from proxy.wire.handover.prefill_leg import PrefillLeg
from proxy.wire.handover.release import (
    LEFT_TO_EXPIRE,
    MAX_RELEASE_TRIES,
    RELEASE_TIMEOUT_S,
    RELEASED,
    AbandonedPrefill,
    parse_fields,
    release_blocks,
)
from proxy.wire.worker.connection import WorkerError
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.site import Fake, Site, eventually

TAKEN = PrefillResult(b'{"do_remote_prefill":true,"remote_request_id":"r"}')


class Nobody:
    """Whoever has left."""

    connection = None

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of one who has left")


KEY = b"Authorization: Bearer theirs\r\n"


async def two(start: Start) -> Site:
    """Start a router before two decode workers and a prefill worker."""
    fakes = Fake("d0", Role.DECODE), Fake("d1", Role.DECODE), Fake("p0", Role.PREFILL)
    site = await start(*fakes, router={"transfer": True})
    site.stand_still()  # who is asked next is so at once, not once patience with the last is over
    return site


def ends(site: Site) -> dict[str, int]:
    return site.metrics.handovers.ends


async def test_a_refusal_is_what_is_wanted(start: Start) -> None:
    site = await two(start)
    site.fakes["d0"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, KEY)
    await eventually(lambda: ends(site) == {RELEASED: 1})
    [call] = site.fakes["d0"].served
    assert call.path == "/v1/completions"
    assert call.json()["kv_transfer_params"] == json.loads(TAKEN.params or b"")
    assert call.all(b"authorization") == [b"Bearer theirs"]


@pytest.mark.parametrize(
    "script",
    [
        *map(scripts.error, (401, 403, 413, 429, 500, 503)),
        scripts.reset,
        scripts.hang_up,
    ],
)
async def test_what_fails_is_asked_of_another(start: Start, script: scripts.Script) -> None:
    site = await two(start)
    site.fakes["d0"].then(script)
    site.fakes["d1"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: ends(site) == {RELEASED: 1})
    assert [len(site.fakes[name].served) for name in ("d0", "d1", "p0")] == [1, 1, 0]


async def test_what_fails_everywhere_is_left_to_expire(start: Start) -> None:
    site = await two(start)
    site.always(scripts.error(401))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: ends(site) == {LEFT_TO_EXPIRE: 1})
    assert len(site.served()) == 2
    assert site.wire.releases == set()


async def test_a_large_fleet_is_not_asked_one_by_one(start: Start) -> None:
    site = await start(*(Fake(f"d{n}", Role.DECODE) for n in range(5)), router={"transfer": True})
    site.stand_still()
    site.always(scripts.reset)
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: ends(site) == {LEFT_TO_EXPIRE: 1})
    assert len(site.served()) == MAX_RELEASE_TRIES


async def test_one_that_hangs_is_not_waited_for_for_ever(start: Start) -> None:
    site = await two(start)
    site.fakes["d0"].then(scripts.stall)
    site.fakes["d1"].then(scripts.error(400, "too long"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: site.fakes["d0"].served)
    site.skip(RELEASE_TIMEOUT_S + 1)
    await eventually(lambda: ends(site) == {RELEASED: 1})
    assert site.wire.releases == set()


async def test_one_that_drains_will_do(start: Start) -> None:
    site = await two(start)
    site.fleet.roster.drain("d1")
    site.fakes["d1"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"", healthy=False)
    await eventually(lambda: ends(site) == {RELEASED: 1})


async def test_another_decode_worker_does_it_for_one_that_is_not_well(start: Start) -> None:
    site = await two(start)
    site.fakes["d1"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"", healthy=False)
    await eventually(lambda: ends(site) == {RELEASED: 1})
    assert site.fakes["p0"].served == []
    site.down("d1")
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"", healthy=False)
    assert ends(site) == {RELEASED: 1, LEFT_TO_EXPIRE: 1}


async def test_where_nothing_was_taken_nothing_is_sent(start: Start) -> None:
    site = await two(start)
    release_blocks(site.wire, site.clock(), site.worker("d0"), PrefillResult(), b"")
    await asyncio.sleep(0)
    assert (ends(site), site.served()) == ({}, [])


async def test_an_answer_that_nobody_waits_for_is_released(start: Start) -> None:
    site = await two(start)
    pair = Pair(Side("p0", "h"), Side("d0", "h"), "1")
    params = dict.fromkeys(
        ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"], 1
    )
    whole = params | {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    leg = PrefillLeg(Nobody(), 60.0)
    orphan = AbandonedPrefill(site.wire, pair, site.worker("d0"), b"", leg)
    orphan.prefilled(site.clock(), json.dumps({"kv_transfer_params": whole}).encode())
    await eventually(lambda: site.fakes["d0"].served)
    assert site.fakes["d0"].served[0].json()["kv_transfer_params"] == whole
    orphan.prefilled(site.clock(), b"{}")
    assert len(site.wire.releases) <= 1


@pytest.mark.parametrize("begun", [True, False])
async def test_an_answer_that_breaks_off_leaves_its_blocks(start: Start, begun: bool) -> None:
    site = await two(start)
    leg = PrefillLeg(Nobody(), 60.0)
    pair = Pair(Side("p0", "h"), Side("d0", "h"), "1")
    orphan = AbandonedPrefill(site.wire, pair, site.worker("d0"), b"", leg)
    if begun:
        head = ResponseHead()
        head.status = 200
        leg.begun(site.clock(), head)
    orphan.adopt(site.clock())
    assert site.wire.releases == {orphan}
    orphan.lost(site.clock(), WorkerError.RESET)
    assert ends(site) == ({LEFT_TO_EXPIRE: 1} if begun else {})
    assert site.wire.releases == set()


@pytest.mark.parametrize("answer", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_an_answer_that_makes_no_sense_has_nothing_in_it(answer: bytes) -> None:
    assert parse_fields(answer) == {}

"""Blocks that no decode worker fetches."""

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


class UnusedOwner:
    """An owner that has left."""

    connection = None

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} called after the owner has left")


KEY = b"Authorization: Bearer theirs\r\n"


async def start_three(start: Start) -> Site:
    """Start a router before two decode workers and a prefill worker."""
    fakes = Fake("d0", Role.DECODE), Fake("d1", Role.DECODE), Fake("p0", Role.PREFILL)
    site = await start(*fakes, router={"transfer": True})
    site.stand_still()  # no timeout moves a release to the next worker
    return site


def handover_ends(site: Site) -> dict[str, int]:
    return site.metrics.handovers.ends


async def test_refusal_by_the_decode_worker_is_a_release(start: Start) -> None:
    site = await start_three(start)
    site.fakes["d0"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, KEY)
    await eventually(lambda: handover_ends(site) == {RELEASED: 1})
    [call] = site.fakes["d0"].served
    assert call.path == "/v1/completions"
    assert call.json()["kv_transfer_params"] == json.loads(TAKEN.params or b"")
    assert call.all(b"authorization") == [b"Bearer theirs"]


@pytest.mark.parametrize(
    "script", [*map(scripts.error, (401, 403, 413, 429, 500, 503)), scripts.reset, scripts.hang_up]
)
async def test_failed_release_is_sent_to_another_worker(
    start: Start, script: scripts.Script
) -> None:
    site = await start_three(start)
    site.fakes["d0"].then(script)
    site.fakes["d1"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: handover_ends(site) == {RELEASED: 1})
    assert [len(site.fakes[name].served) for name in ("d0", "d1", "p0")] == [1, 1, 0]


async def test_release_that_fails_everywhere_is_left_to_expire(start: Start) -> None:
    site = await start_three(start)
    site.always(scripts.error(401))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: handover_ends(site) == {LEFT_TO_EXPIRE: 1})
    assert len(site.served()) == 2
    assert site.wire.releases == set()


async def test_release_has_a_limit_of_tries(start: Start) -> None:
    site = await start(*(Fake(f"d{n}", Role.DECODE) for n in range(5)), router={"transfer": True})
    site.stand_still()
    site.always(scripts.reset)
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: handover_ends(site) == {LEFT_TO_EXPIRE: 1})
    assert len(site.served()) == MAX_RELEASE_TRIES


async def test_hung_release_times_out(start: Start) -> None:
    site = await start_three(start)
    site.fakes["d0"].then(scripts.stall)
    site.fakes["d1"].then(scripts.error(400, "too long"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"")
    await eventually(lambda: site.fakes["d0"].served)
    site.skip(RELEASE_TIMEOUT_S + 1)
    await eventually(lambda: handover_ends(site) == {RELEASED: 1})
    assert site.wire.releases == set()


async def test_draining_worker_can_release(start: Start) -> None:
    site = await start_three(start)
    site.fleet.roster.drain("d1")
    site.fakes["d1"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"", healthy=False)
    await eventually(lambda: handover_ends(site) == {RELEASED: 1})


async def test_unhealthy_decode_worker_is_replaced_for_a_release(start: Start) -> None:
    site = await start_three(start)
    site.fakes["d1"].then(scripts.error(404, "no such model"))
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"", healthy=False)
    await eventually(lambda: handover_ends(site) == {RELEASED: 1})
    assert site.fakes["p0"].served == []
    site.down("d1")
    release_blocks(site.wire, site.clock(), site.worker("d0"), TAKEN, b"", healthy=False)
    assert handover_ends(site) == {RELEASED: 1, LEFT_TO_EXPIRE: 1}


async def test_prefill_without_parameters_sends_no_release(start: Start) -> None:
    site = await start_three(start)
    release_blocks(site.wire, site.clock(), site.worker("d0"), PrefillResult(), b"")
    await asyncio.sleep(0)
    assert (handover_ends(site), site.served()) == ({}, [])


async def test_abandoned_prefill_response_is_released(start: Start) -> None:
    site = await start_three(start)
    pair = Pair(Side("p0", "h"), Side("d0", "h"), "1")
    params = dict.fromkeys(
        ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"], 1
    )
    whole = params | {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    leg = PrefillLeg(UnusedOwner(), 60.0)
    abandoned = AbandonedPrefill(site.wire, pair, site.worker("d0"), b"", leg)
    abandoned.prefilled(site.clock(), json.dumps({"kv_transfer_params": whole}).encode())
    await eventually(lambda: site.fakes["d0"].served)
    assert site.fakes["d0"].served[0].json()["kv_transfer_params"] == whole
    abandoned.prefilled(site.clock(), b"{}")
    assert len(site.wire.releases) <= 1


@pytest.mark.parametrize("begun", [True, False])
async def test_broken_abandoned_response_leaves_blocks_to_expire(start: Start, begun: bool) -> None:
    site = await start_three(start)
    leg = PrefillLeg(UnusedOwner(), 60.0)
    pair = Pair(Side("p0", "h"), Side("d0", "h"), "1")
    abandoned = AbandonedPrefill(site.wire, pair, site.worker("d0"), b"", leg)
    if begun:
        head = ResponseHead()
        head.status = 200
        leg.begun(site.clock(), head)
    abandoned.adopt(site.clock())
    assert site.wire.releases == {abandoned}
    abandoned.lost(site.clock(), WorkerError.RESET)
    assert handover_ends(site) == ({LEFT_TO_EXPIRE: 1} if begun else {})
    assert site.wire.releases == set()


@pytest.mark.parametrize("answer", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_malformed_response_has_no_fields(answer: bytes) -> None:
    assert parse_fields(answer) == {}

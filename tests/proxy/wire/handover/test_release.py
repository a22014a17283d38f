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
REFUSAL = scripts.error(404, "no such model")


async def start_decodes(start: Start, decodes: int = 2) -> Site:
    """Start a router before decode workers and a prefill worker."""
    fakes = [Fake(f"d{n}", Role.DECODE) for n in range(decodes)]
    site = await start(*fakes, Fake("p0", Role.PREFILL), router={"transfer": True})
    site.stand_still()  # no timeout moves a release to the next worker
    return site


def release(
    site: Site, taken: PrefillResult = TAKEN, key: bytes = b"", *, healthy: bool = True
) -> None:
    """Release blocks through the first decode worker."""
    release_blocks(site.wire, site.clock(), site.worker("d0"), taken, key, healthy=healthy)


async def ends(site: Site, **ends: int) -> None:
    """Wait until blocks have ended in these ways, and check that no release runs."""
    await eventually(lambda: site.metrics.handovers.ends == ends)
    assert site.wire.releases == set()


def served(site: Site) -> list[int]:
    return [len(fake.served) for fake in site.fakes.values()]


async def test_refusal_by_the_decode_worker_is_a_release(start: Start) -> None:
    site = await start_decodes(start)
    site.fakes["d0"].then(REFUSAL)
    release(site, key=b"Authorization: Bearer theirs\r\n")
    await ends(site, **{RELEASED: 1})
    [call] = site.served()
    assert (call.connection.worker.name, call.path) == ("d0", "/v1/completions")
    assert call.json()["kv_transfer_params"] == json.loads(TAKEN.params or b"")
    assert call.all(b"authorization") == [b"Bearer theirs"]


@pytest.mark.parametrize(
    "script", [*map(scripts.error, (401, 413, 429, 500)), scripts.reset, scripts.hang_up]
)
async def test_failed_release_is_sent_to_another_worker(
    start: Start, script: scripts.Script
) -> None:
    site = await start_decodes(start)
    site.fakes["d0"].then(script)
    site.fakes["d1"].then(REFUSAL)
    release(site)
    await ends(site, **{RELEASED: 1})
    assert served(site) == [1, 1, 0]


@pytest.mark.parametrize("decodes", [MAX_RELEASE_TRIES - 1, MAX_RELEASE_TRIES + 1])
async def test_release_that_fails_everywhere_is_left_to_expire(start: Start, decodes: int) -> None:
    site = await start_decodes(start, decodes)
    site.always(scripts.error(401))
    release(site)
    await ends(site, **{LEFT_TO_EXPIRE: 1})
    assert sum(served(site)) == min(decodes, MAX_RELEASE_TRIES)


async def test_hung_release_times_out(start: Start) -> None:
    site = await start_decodes(start)
    site.fakes["d0"].then(scripts.stall)
    site.fakes["d1"].then(scripts.error(400, "too long"))
    release(site)
    await eventually(lambda: site.fakes["d0"].served)
    site.skip(RELEASE_TIMEOUT_S + 1)
    await ends(site, **{RELEASED: 1})


async def test_unhealthy_decode_worker_is_replaced_for_a_release(start: Start) -> None:
    site = await start_decodes(start)
    site.fleet.roster.drain("d1")  # it can still release
    site.fakes["d1"].then(REFUSAL)
    release(site, healthy=False)
    await ends(site, **{RELEASED: 1})
    assert served(site) == [0, 1, 0]
    site.down("d1")
    release(site, healthy=False)
    await ends(site, **{RELEASED: 1, LEFT_TO_EXPIRE: 1})


async def test_prefill_without_parameters_sends_no_release(start: Start) -> None:
    site = await start_decodes(start)
    release(site, PrefillResult())
    await asyncio.sleep(0)
    await ends(site)
    assert site.served() == []


class UnusedOwner:
    """An owner that has left."""

    connection = None

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} called after the owner has left")


@pytest.mark.parametrize("begun", [True, False])
async def test_broken_abandoned_response_leaves_blocks_to_expire(start: Start, begun: bool) -> None:
    site = await start_decodes(start)
    leg = PrefillLeg(UnusedOwner(), 60.0)
    pair = Pair(Side("p0", "h"), Side("d0", "h"), "1")
    abandoned = AbandonedPrefill(site.wire, pair, site.worker("d0"), b"", leg)
    if begun:
        head = ResponseHead()
        head.status = 200
        leg.response_begun(site.clock(), head)
    abandoned.adopt(site.clock())
    assert site.wire.releases == {abandoned}
    leg.connection_failed(site.clock(), WorkerError.RESET)
    await ends(site, **({LEFT_TO_EXPIRE: 1} if begun else {}))


@pytest.mark.parametrize("answer", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_malformed_response_has_no_fields(answer: bytes) -> None:
    assert parse_fields(answer) == {}

"""Bodies that are held: together they take no more memory than they may."""

from __future__ import annotations

from hashlib import sha256

import pytest

from proxy.core.tenants.tenants import Tenants, TenantSpec
from proxy.http.body_budget import ANONYMOUS_ACCOUNT, BodyBudget
from proxy.http.headers import RefusedError
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, Site, eventually

MOST = 100_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n"


def test_it_counts() -> None:
    collecting = BodyBudget(100)
    collecting.take(60)
    with pytest.raises(RefusedError) as error:
        collecting.take(41)
    assert error.value.refusal.status == 503
    collecting.take(40)
    collecting.give(100)
    assert collecting.held == 0


def tenants(*names: str) -> Tenants:
    """Keep these tenants, whose keys are their names."""
    kept = Tenants()
    replace(kept, *names)
    return kept


def replace(kept: Tenants, *names: str) -> None:
    hashes = {sha256(name.encode()).digest(): name for name in names}
    kept.replace([TenantSpec(name) for name in names], hashes)


def test_of_what_is_in_no_part_a_tenant_has_no_more_than_it_leaves_free() -> None:
    collecting = BodyBudget(160, tenants("a", "b", "c"))  # ten each, and strangers; 120 for all
    for whose, most in (("a", 70), ("b", 40), ("c", 25)):
        for _ in range(most):
            collecting.take(1, whose)
        with pytest.raises(RefusedError) as error:
            collecting.take(1, whose)
        assert error.value.refusal.status == 429
    assert collecting.held == 135
    collecting.give(65, "a")
    collecting.take(20, "b")
    assert collecting.held == 90
    collecting.give(60, "b")
    collecting.give(25, "c")
    collecting.give(5, "a")
    assert collecting.held == 0
    collecting.take(70, "a")


def test_one_body_it_may_have_whatever_its_size_and_others_their_parts() -> None:
    collecting = BodyBudget(160, tenants("a", "b", "c"))
    collecting.take(10, "a")
    for before in range(0, 120, 20):
        collecting.take(20, "a", before)
    collecting.take(10, "b")
    with pytest.raises(RefusedError) as error:
        collecting.take(1, "b")
    assert error.value.refusal.status == 503
    collecting.take(10, "c")
    collecting.take(10, ANONYMOUS_ACCOUNT)
    assert collecting.held == 160
    collecting.give(10, "b")
    collecting.give(120, "a")
    collecting.take(60, "b")


def test_the_parts_are_made_anew_for_those_that_there_are() -> None:
    kept = tenants("a")
    collecting = BodyBudget(160, kept)
    collecting.take(100, "a")  # twenty, and eighty beside
    replace(kept, "a", "b", "c")
    collecting.account(None)
    collecting.take(30, "a", 100)
    with pytest.raises(RefusedError):
        collecting.take(1, "a", 130)
    replace(kept)
    collecting.account(None)
    collecting.take(30)
    assert collecting.held == 160
    collecting.give(130, "a")
    collecting.give(30)
    assert collecting.held == 0


def test_the_largest_body_has_room_whatever_the_parts() -> None:
    kept = tenants("a", "b")
    collecting = BodyBudget(160, kept, 160)
    collecting.take(160, "a")
    collecting.give(160, "a")
    collecting.limit(160, 145)
    collecting.take(5, "b")
    collecting.take(145, "a")
    with pytest.raises(RefusedError):
        collecting.take(6, "a", 145)


def test_without_tenants_all_have_all_of_it() -> None:
    kept = tenants("a")
    collecting = BodyBudget(120, kept)
    assert [collecting.account(each) for each in (kept.get("a"), None)] == ["a", ""]
    replace(kept)
    assert collecting.account(None) is None
    collecting.take(60)
    collecting.take(60)
    collecting.give(120)


@pytest.fixture
async def small(start: Start) -> Site:
    return await start(wire={"max_collected_bytes": MOST, "max_body_bytes": MOST})


async def test_slow_bodies_do_not_fill_the_memory(small: Site) -> None:
    slow = [await small.client() for _ in range(4)]
    for client in slow[:3]:
        await client.send(HEAD + b"x" * 30_000)
    await eventually(lambda: small.wire.collecting.held == 90_000)
    await slow[3].send(HEAD + b"x" * 30_000)
    answer = await slow[3].answer()
    assert answer.status == 503
    assert answer.error()["code"] == "too_many_bodies"
    assert int(answer.one(b"retry-after")) >= 1
    assert small.wire.collecting.held == 90_000
    assert (await small.ask(chat("hi"))).status == 200, "small ones pass"
    slow[0].close()
    slow[1].reset()
    await eventually(lambda: small.wire.collecting.held == 30_000)


async def test_what_is_whole_counts_until_its_worker_begins(small: Site) -> None:
    gate = small.fake.hold()
    clients = [await small.client() for _ in range(2)]
    for number, client in enumerate(clients, start=1):
        await client.send(chat("x" * 40_000))
        await small.fake.got(number)
    assert 80_000 < small.wire.collecting.held <= MOST
    refused = await small.ask(chat("x" * 40_000))
    assert refused.status == 503
    assert refused.error()["code"] == "too_many_bodies"
    clients[0].close()
    await eventually(lambda: small.wire.collecting.held < 50_000)
    gate.set()
    assert (await clients[1].answer()).status == 200
    assert small.wire.collecting.held == 0
    assert (await small.ask(chat("x" * 40_000))).status == 200, "it was its size alone"


async def test_what_waits_counts_whichever_way_it_ends(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1), router={"queue_wait_s": 30.0})
    gate = site.fake.hold(scripts.error(500))
    clients = [await site.client() for _ in range(3)]
    for client in clients:
        await client.send(chat("x" * 40_000))
    await eventually(lambda: len(site.router.queue) == 2)
    assert site.wire.collecting.held > 120_000
    clients[1].close()
    await eventually(lambda: site.wire.collecting.held < 90_000)
    site.skip(31.0)
    assert (await clients[2].answer()).status == 429
    gate.set()
    assert (await clients[0].answer()).status == 500
    assert site.wire.collecting.held == 0


async def test_what_is_refused_for_its_head_takes_nothing(small: Site) -> None:
    client = await small.send(HEAD.replace(b"/v1/completions", b"/nowhere") + b"x" * 80_000)
    await client.send(b"x" * 10_000)
    assert (await client.answer()).status == 404
    assert small.wire.collecting.held == 0


def slow(path: str = "/v1/completions", key: str = "") -> bytes:
    """Return the beginning of a large body whose end never comes."""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{shown}Content-Length: 90000\r\n\r\n"
    return head.encode() + b"x" * 25_000


@pytest.mark.parametrize("whose", ["a", ""], ids=["a tenant", "strangers"])
async def test_who_sends_bodies_without_end_shuts_out_nobody_else(small: Site, whose: str) -> None:
    replace(small.router.tenants, "a", "b")
    begun = slow(key=whose) if whose else slow("/health").replace(b"POST", b"GET")
    many = [await small.client() for _ in range(4)]
    for number, client in enumerate(many[:2], start=1):
        await client.send(begun)
        await eventually(lambda n=number: small.wire.collecting.held == n * 25_000)  # type: ignore[misc]
    for client in many[2:]:
        await client.send(begun)
        refused = await client.answer()
        assert (refused.status, refused.error()["code"]) == (429, "too_many_bodies")
    mine = chat("x" * 20_000, b"Authorization: Bearer b")
    assert (await small.ask(mine)).status == 200
    assert small.wire.collecting.held == 50_000


async def test_what_a_tenant_had_is_given_back_whoever_there_is_by_then(small: Site) -> None:
    replace(small.router.tenants, "a", "b")
    client = await small.client()
    await client.ask(chat("hi", b"Authorization: Bearer a"))
    await client.send(chat("x" * 20_000, b"Authorization: Bearer a")[:-5])
    await eventually(lambda: small.wire.collecting.held > 20_000)
    replace(small.router.tenants)
    client.close()
    await eventually(lambda: not small.wire.collecting.held)
    replace(small.router.tenants, "a")
    assert (await small.ask(chat("hi", b"Authorization: Bearer a"))).status == 200
    assert small.wire.collecting.held == 0

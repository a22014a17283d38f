"""The memory limit of request bodies held by the router."""

from __future__ import annotations

from hashlib import sha256

import pytest

from proxy.core.model.refusals import RefusedError
from proxy.core.tenants.tenants import Tenants, TenantSpec
from proxy.http.body_budget import ANONYMOUS_ACCOUNT, BodyBudget
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import bearer, chat
from tests.proxy.wire.site import Fake, Site, eventually

MAX_HELD_BYTES = 100_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n"


def test_budget_counts_held_bytes() -> None:
    budget = BodyBudget(100)
    budget.reserve(60)
    with pytest.raises(RefusedError) as error:
        budget.reserve(41)
    assert error.value.refusal.status == 503
    budget.reserve(40)
    budget.release(100)
    assert budget.held == 0


def tenants_named(*names: str) -> Tenants:
    """Return tenants with these names, which are their keys too."""
    tenants = Tenants()
    replace(tenants, *names)
    return tenants


def replace(tenants: Tenants, *names: str) -> None:
    hashes = {sha256(name.encode()).digest(): name for name in names}
    tenants.replace([TenantSpec(name) for name in names], hashes)


def test_bodies_stay_only_while_they_exclude_no_request() -> None:
    budget = BodyBudget(160, tenants_named("a", "b", "c"))  # 10 each, strangers too; 120 shared
    for account, amount in (("a", 39), ("b", 35)):
        assert budget.may_be_kept(account)
        budget.reserve(amount, account)
    assert budget.may_be_kept("a")
    budget.reserve(1, "a")
    assert not budget.may_be_kept("a")  # a quarter of the shared part beyond its share
    assert budget.may_be_kept("b")
    budget.reserve(5, "b")
    assert not budget.may_be_kept("c")  # half of the shared part is used
    budget.release(40, "a")
    assert budget.may_be_kept("a")
    assert BodyBudget(100).may_be_kept(None)


def test_tenant_takes_at_most_half_of_the_shared_budget() -> None:
    budget = BodyBudget(160, tenants_named("a", "b", "c"))  # 10 each, strangers too; 120 shared
    for owner, amount in (("a", 70), ("b", 40), ("c", 25)):
        for _ in range(amount):
            budget.reserve(1, owner)
        with pytest.raises(RefusedError) as error:
            budget.reserve(1, owner)
        assert error.value.refusal.status == 429
    assert budget.held == 135
    budget.release(65, "a")
    budget.reserve(20, "b")
    assert budget.held == 90
    budget.release(60, "b")
    budget.release(25, "c")
    budget.release(5, "a")
    assert budget.held == 0
    budget.reserve(70, "a")


def test_one_large_body_leaves_the_reserved_parts_of_others() -> None:
    budget = BodyBudget(160, tenants_named("a", "b", "c"))
    budget.reserve(10, "a")
    for before in range(0, 120, 20):
        budget.reserve(20, "a", before)
    budget.reserve(10, "b")
    with pytest.raises(RefusedError) as error:
        budget.reserve(1, "b")
    assert error.value.refusal.status == 503
    budget.reserve(10, "c")
    budget.reserve(10, ANONYMOUS_ACCOUNT)
    assert budget.held == 160
    budget.release(10, "b")
    budget.release(120, "a")
    budget.reserve(60, "b")


def test_parts_are_recomputed_when_tenants_change() -> None:
    tenants = tenants_named("a")
    budget = BodyBudget(160, tenants)
    budget.reserve(100, "a")  # 20 of its own and 80 shared
    replace(tenants, "a", "b", "c")
    budget.account(None)
    budget.reserve(30, "a", 100)
    with pytest.raises(RefusedError):
        budget.reserve(1, "a", 130)
    replace(tenants)
    budget.account(None)
    budget.reserve(30)
    assert budget.held == 160
    budget.release(130, "a")
    budget.release(30)
    assert budget.held == 0


def test_largest_body_always_fits() -> None:
    tenants = tenants_named("a", "b")
    budget = BodyBudget(160, tenants, 160)
    budget.reserve(160, "a")
    budget.release(160, "a")
    budget.limit(160, 145)
    budget.reserve(5, "b")
    budget.reserve(145, "a")
    with pytest.raises(RefusedError):
        budget.reserve(6, "a", 145)


def test_no_tenants_share_the_whole_budget() -> None:
    tenants = tenants_named("a")
    budget = BodyBudget(120, tenants)
    assert [budget.account(owner) for owner in (tenants.get("a"), None)] == ["a", ""]
    replace(tenants)
    assert budget.account(None) is None
    budget.reserve(60)
    budget.reserve(60)
    budget.release(120)


@pytest.fixture
async def small(start: Start) -> Site:
    return await start(
        wire={"max_collected_bytes": MAX_HELD_BYTES, "max_body_bytes": MAX_HELD_BYTES}
    )


async def test_slow_bodies_are_503_above_the_limit(small: Site) -> None:
    clients = [await small.client() for _ in range(4)]
    for client in clients[:3]:
        await client.send(HEAD + b"x" * 30_000)
    await eventually(lambda: small.wire.body_budget.held == 90_000)
    await clients[3].send(HEAD + b"x" * 30_000)
    answer = await clients[3].answer()
    assert answer.status == 503
    assert answer.error()["code"] == "too_many_bodies"
    assert int(answer.one(b"retry-after")) >= 1
    assert small.wire.body_budget.held == 90_000
    assert (await small.ask(chat("hi"))).status == 200, "small bodies pass"
    clients[0].close()
    clients[1].reset()
    await eventually(lambda: small.wire.body_budget.held == 30_000)


async def test_complete_bodies_count_until_the_worker_responds(small: Site) -> None:
    gate = small.fake.hold()
    clients = [await small.client() for _ in range(2)]
    for number, client in enumerate(clients, start=1):
        await client.send(chat("x" * 40_000))
        await small.fake.got(number)
    assert 80_000 < small.wire.body_budget.held <= MAX_HELD_BYTES
    refused = await small.ask(chat("x" * 40_000))
    assert refused.status == 503
    assert refused.error()["code"] == "too_many_bodies"
    clients[0].close()
    await eventually(lambda: small.wire.body_budget.held < 50_000)
    gate.set()
    assert (await clients[1].answer()).status == 200
    assert small.wire.body_budget.held == 0
    assert (await small.ask(chat("x" * 40_000))).status == 200, "only the size was the reason"


async def test_queued_bodies_count_until_they_end(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1), router={"queue_wait_s": 30.0})
    gate = site.fake.hold(scripts.error(500))
    clients = [await site.client() for _ in range(3)]
    for client in clients:
        await client.send(chat("x" * 40_000))
    await eventually(lambda: len(site.router.queue) == 2)
    assert site.wire.body_budget.held > 120_000
    clients[1].close()
    await eventually(lambda: site.wire.body_budget.held < 90_000)
    site.skip(31.0)
    assert (await clients[2].answer()).status == 429
    gate.set()
    assert (await clients[0].answer()).status == 500
    assert site.wire.body_budget.held == 0


@pytest.mark.parametrize("owner", ["a", ""], ids=["a tenant", "strangers"])
async def test_endless_bodies_do_not_block_other_tenants(small: Site, owner: str) -> None:
    replace(small.router.tenants, "a", "b")
    line = b"POST /v1/completions HTTP/1.1\r\n" + bearer("a") if owner else b"GET /health HTTP/1.1"
    head_and_part = line + b"\r\nHost: x\r\nContent-Length: 90000\r\n\r\n" + b"x" * 25_000
    clients = [await small.client() for _ in range(4)]
    for number, client in enumerate(clients[:2], start=1):
        await client.send(head_and_part)
        await eventually(lambda n=number: small.wire.body_budget.held == n * 25_000)  # type: ignore[misc]
    for client in clients[2:]:
        await client.send(head_and_part)
        refused = await client.answer()
        assert (refused.status, refused.error()["code"]) == (429, "too_many_bodies")
    assert (await small.ask(chat("x" * 20_000, bearer("b")))).status == 200
    assert small.wire.body_budget.held == 50_000


async def test_bytes_of_a_removed_tenant_are_released(small: Site) -> None:
    replace(small.router.tenants, "a", "b")
    client = await small.client()
    await client.ask(chat("hi", bearer("a")))
    await client.send(chat("x" * 20_000, bearer("a"))[:-5])
    await eventually(lambda: small.wire.body_budget.held > 20_000)
    replace(small.router.tenants)
    client.close()
    await eventually(lambda: not small.wire.body_budget.held)
    replace(small.router.tenants, "a")
    assert (await small.ask(chat("hi", bearer("a")))).status == 200
    assert small.wire.body_budget.held == 0

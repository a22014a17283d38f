"""Connections made before users need them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from proxy.config import TransferConfig
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome
from proxy.core.router import Router
from proxy.health import warmup as module
from proxy.health.warmup import MAX_RETRY_S, RETRY_S, Warmup
from proxy.metrics.handovers import HandoverCounters
from proxy.transfer.nixl import Nixl
from proxy.transfer.registry import connector
from tests.proxy.core.making import ask, fleet_of, placed, router_of
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.kv import Faults, Kv
from tests.proxy.wire.site import eventually


class Stage:
    """Prefill and decode workers, and the router's view of them."""

    def __init__(self, kv: Kv, fakes: dict[str, FakeWorker], router: Router, name: str) -> None:
        self.kv, self.fakes, self.router = kv, fakes, router
        self.counts = HandoverCounters(str)
        config = TransferConfig.model_validate({"connector": name})
        self.warmup = Warmup(router, connector(config), self.counts)

    def worker(self, name: str) -> Worker:
        found = self.router.fleet.get(name)
        assert found is not None
        return found

    def are_warm(self, *pairs: tuple[str, str]) -> bool:
        links = self.router.links
        return all(links.knows(self.worker(p), self.worker(d)) for p, d in pairs)

    def is_cold(self, prefill: str, decode: str) -> bool:
        """Whether the core leaves them alone, and a prompt is served whole."""
        first, second = self.worker(prefill), self.worker(decode)
        one = replace(ask(5000), model=first.model)
        lease = placed(self.router.submit(one, 0.0))
        self.router.finish(lease, 0.0, Outcome.MOOT)
        assert (lease.prefill is None) == self.router.links.are_cold(first, second)
        return lease.prefill is None

    def later(self, seconds: float) -> None:
        """Have time pass."""
        now = self.warmup.clock() + seconds
        self.warmup.clock = lambda: now

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let it work."""
        task = asyncio.create_task(self.warmup.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def stage(
    prefills: int = 1, decodes: int = 1, name: str = "nixl", api_key: str | None = None
) -> AsyncIterator[Stage]:
    """Start workers."""
    kv = Kv()
    roles = {f"p{n}": Role.PREFILL for n in range(prefills)}
    roles |= {f"d{n}": Role.DECODE for n in range(decodes)}
    fakes = {}
    specs = []
    for who, role in roles.items():
        fake = fakes[who] = FakeWorker(who)
        await fake.listen()
        fake.always(kv.worker(fake, role.value))
        specs.append(WorkerSpec(who, fake.url, role, "tiny", api_key=api_key))
    try:
        yield Stage(kv, fakes, router_of(*specs, transfer=True, disaggregate_above=1), name)
    finally:
        for fake in fakes.values():
            await fake.stop()
    assert kv.faults == []
    assert kv.held == []


async def test_each_pair_is_connected_once() -> None:
    async with stage(2, 2) as here:
        pairs = [(p, d) for p in ("p0", "p1") for d in ("d0", "d1")]
        assert here.router.links.are_cold(here.worker("p0"), here.worker("d0"))
        async with here.running():
            await eventually(lambda: here.are_warm(*pairs))
            await asyncio.sleep(0.3)
        assert here.counts.warmups == {"done": 4}
        assert here.kv.ends() == ["read"] * 4
        assert len({each.prompt for each in here.kv.pinned}) == 4  # nothing of it is cached


async def test_both_legs_bear_the_workers_key() -> None:
    async with stage(api_key="hush") as here:
        async with here.running():
            await eventually(lambda: here.are_warm(("p0", "d0")))
        for fake in here.fakes.values():
            [call] = fake.served
            assert call.all(b"authorization") == [b"Bearer hush"]


async def test_a_worker_that_comes_back_is_connected_again() -> None:
    async with stage() as here:
        async with here.running():
            await eventually(lambda: here.are_warm(("p0", "d0")))
            here.worker("d0").up_since = 99.0
            assert not here.are_warm(("p0", "d0"))
            await eventually(lambda: here.are_warm(("p0", "d0")))
        assert here.counts.warmups == {"done": 2}


def failing(kv: Kv, times: int) -> None:
    """Have so many decode legs fail, and the blocks be given back each time."""
    leg, release = Faults(before=scripts.error(500)), Faults()
    kv.inject("decode", *[leg, release] * times)


async def test_a_link_that_does_not_come_about_stays_cold_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts are served whole meanwhile: nobody pays for a link that does not work."""
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    async with stage() as here:
        failing(here.kv, 5)
        prefill = here.worker("p0")
        note = "prefills nothing for d0 yet: the first transfer failed"
        async with here.running():
            assert here.is_cold("p0", "d0")
            for number, pause_s in enumerate((RETRY_S, 2 * RETRY_S, 4 * RETRY_S), 1):
                await eventually(lambda n=number: here.counts.bars == {("p0", "d0"): n})  # type: ignore[misc]
                # Three tries at first, then one at a time.
                assert here.counts.warmups == {"failed": 2 + number}
                assert here.is_cold("p0", "d0")
                assert here.router.links.note(prefill, 0.0) == note
                assert "the first transfer failed: d0: status 500" in caplog.text
                assert f"the next try is in {pause_s:g} s" in caplog.text
                here.later(pause_s)
            await eventually(lambda: here.are_warm(("p0", "d0")))
        assert here.counts.warmups == {"failed": 5, "done": 1}
        assert not here.is_cold("p0", "d0")
        assert here.router.links.note(prefill, 0.0) == ""
        assert here.kv.ends() == ["released"] * 5 + ["read"]


async def test_a_connector_at_fault_is_tried_as_seldom_as_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: object) -> bytes:
        raise KeyError("unforeseen")

    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(Nixl, "request_id", wrong)
    async with stage() as here, here.running():
        await eventually(lambda: here.counts.bars == {("p0", "d0"): 1})
        assert here.is_cold("p0", "d0")
    assert caplog.text.count("KeyError: 'unforeseen'") == here.counts.warmups["failed"] == 3


async def test_it_is_tried_every_ten_minutes_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.9 * MAX_RETRY_S)
    async with stage() as here:
        failing(here.kv, 5)
        async with here.running():
            for tries in (3, 4, 5):
                await eventually(lambda n=tries: here.counts.bars == {("p0", "d0"): n - 2})  # type: ignore[misc]
                assert here.counts.warmups == {"failed": tries}
                here.later(MAX_RETRY_S)
            await eventually(lambda: here.are_warm(("p0", "d0")))


async def test_a_restarted_worker_is_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    async with stage() as here:
        failing(here.kv, 3)
        async with here.running():
            await eventually(lambda: here.counts.bars)
            here.worker("d0").up_since = 99.0
            await eventually(lambda: here.are_warm(("p0", "d0")))
        assert here.counts.warmups == {"failed": 3, "done": 1}


async def test_without_a_key_users_connect_first(caplog: pytest.LogCaptureFixture) -> None:
    async with stage() as here:
        here.fakes["p0"].always(scripts.error(401))
        async with here.running():
            await eventually(lambda: here.are_warm(("p0", "d0")))
        assert here.counts.warmups == {"no_key": 1}
        assert not here.counts.bars
        assert "p0 requires a key (status 401), and the router has none" in caplog.text


async def test_a_key_that_is_refused_makes_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    async with stage(api_key="wrong") as here:
        here.fakes["p0"].always(scripts.error(401))
        async with here.running():
            await eventually(lambda: here.counts.bars)
        assert here.counts.warmups == {"failed": 3}
        assert here.is_cold("p0", "d0")


async def test_nobody_is_followed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    async with stage(2, api_key="hush") as here:
        there = f"{here.fakes['p1'].url}/v1/completions".encode()
        here.router.fleet.remove("p1")
        here.fakes["p0"].always(scripts.answer(307, b"", (b"location", there)))
        async with here.running():
            await eventually(lambda: here.counts.bars)
        assert here.counts.warmups == {"failed": 3}
        assert here.fakes["p1"].calls == []


async def test_a_worker_without_the_connector_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)

    async def plain(call: Any) -> None:
        asked = json.loads(call.body)
        assert (asked["max_tokens"], asked["ignore_eos"]) == (1, True)
        await scripts.answer(200, b'{"choices": []}')(call)

    async with stage() as here:
        here.fakes["p0"].always(plain)
        async with here.running():
            await eventually(lambda: here.counts.bars)
        assert here.is_cold("p0", "d0")
        assert here.counts.warmups == {"bare": 3}
        assert "p0 returned no transfer parameters" in caplog.text


async def test_what_looks_wrong_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nixl, "doubt", lambda *_: "says what can't be")
    async with stage() as here:
        async with here.running():
            await eventually(lambda: here.are_warm(("p0", "d0")))
        assert "p0 says what can't be" in caplog.text


# A worker that computes the prompt itself


def counting(fake: FakeWorker, *, fetches: bool) -> None:
    """Tell how many tokens were fetched, as vLLM does; by no request at all if it can't."""
    told = b'vllm:num_requests_running{engine="0"} 0\n%b{engine="0",model_name="m"} %d.0\n'

    async def page(call: Call) -> None:
        number = 100 * len(fake.served) * fetches
        text = told % (b"vllm:external_prefix_cache_hits_total", number)
        await scripts.answer(body=text, content_type=b"text/plain")(call)

    fake.always(page, "/metrics")


async def test_a_decode_worker_that_says_what_it_fetches_is_believed() -> None:
    async with stage() as here:
        counting(here.fakes["d0"], fetches=True)
        async with here.running():
            await eventually(lambda: here.are_warm(("p0", "d0")))
        assert here.counts.warmups == {"done": 1}


async def test_one_that_fetches_nothing_is_no_link(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is as good as any: it has computed the prompt itself."""
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module, "COUNT_WAIT_S", 0.01)
    async with stage(decodes=2) as here:
        counting(here.fakes["d0"], fetches=False)
        counting(here.fakes["d1"], fetches=True)
        links, now = here.router.links, here.warmup.clock
        first, dead, well = (here.worker(name) for name in ("p0", "d0", "d1"))
        async with here.running():
            await eventually(lambda: here.counts.bars == {("p0", "d0"): 1}, within=30.0)
            await eventually(lambda: here.are_warm(("p0", "d1")), within=30.0)
            assert links.is_shut(first, dead, now())
            assert not here.are_warm(("p0", "d0"))
            assert "p0 to d0: the decode worker computed the prompt itself" in caplog.text
            assert here.counts.warmups == {"recomputed": 3, "done": 1}
            assert not links.is_shut(first, well, now())
            # A minute later, and mended.
            counting(here.fakes["d0"], fetches=True)
            here.later(RETRY_S)
            await eventually(lambda: here.are_warm(("p0", "d0")), within=30.0)
        assert not links.is_shut(first, dead, now())


async def test_a_count_that_is_missing_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 60.0)  # one try is enough, and none is cut short
    monkeypatch.setattr(module, "COUNT_WAIT_S", 0.01)
    async with stage() as here:
        fake, pages = here.fakes["d0"], count()
        told = b'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 0.0\n'

        async def page(call: Call) -> None:
            good = scripts.answer(body=told, content_type=b"text/plain")
            await (scripts.error(500) if next(pages) % 2 else good)(call)

        fake.always(page, "/metrics")
        async with here.running():
            await eventually(lambda: here.counts.warmups, within=30.0)
        assert "done" not in here.counts.warmups


async def test_a_worker_that_hangs_delays_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONCURRENT", 1)
    monkeypatch.setattr(module, "LEG_TIMEOUT_S", 0.3)
    monkeypatch.setattr(module, "PAUSE_S", 60.0)
    async with stage(decodes=2) as here:
        here.kv.inject("d0", Faults(before=scripts.stall))
        async with here.running():
            await eventually(lambda: here.are_warm(("p0", "d1")))
            assert here.counts.warmups == {"failed": 1, "done": 1}


async def test_it_stops_at_once_though_a_worker_hangs() -> None:
    async with stage() as here:
        here.kv.inject("d0", *[Faults(before=scripts.stall)] * 2)
        async with asyncio.timeout(10.0), here.running():
            await here.fakes["d0"].got(1)
        for each in here.kv.held:  # they expire
            each.end = "expired"


# What it costs to look


@pytest.mark.plain("replaces a part")
async def test_pairs_that_are_connected_are_not_looked_at_again_and_again() -> None:
    specs = [WorkerSpec(f"p{n}", "http://h", Role.PREFILL, "tiny") for n in range(20)]
    specs += [WorkerSpec(f"d{n}", "http://h", Role.DECODE, "tiny") for n in range(20)]
    router = router_of(*specs, transfer=True)
    nixl = connector(TransferConfig(connector="nixl"))
    warmup = Warmup(router, nixl, HandoverCounters(str))
    asked: list[object] = []
    knows = router.links.knows
    router.links.knows = lambda *pair: asked.append(pair) or knows(*pair)  # type: ignore[method-assign,func-returns-value]
    pairs = [*warmup._cold(0.0)]
    assert len(pairs) == 400
    for pair in pairs:
        router.links.warm(*pair)
    assert [*warmup._cold(0.0)] == []
    asked.clear()
    assert [*warmup._cold(0.0)] == []
    assert asked == []
    decode = pairs[0][1]
    decode.up_since = 99.0
    assert [*warmup._cold(0.0)] == [(p, d) for p, d in pairs if d is decode]
    router.fleet.remove("p0")
    assert all(p.name != "p0" for p, _ in warmup._cold(0.0))
    assert not knows(*pairs[1])  # p0's are forgotten


async def test_connectors_that_need_no_handshake_make_nobody_wait() -> None:
    async with stage(name="shared-storage") as here:
        assert not here.is_cold("p0", "d0")
        await here.warmup.run()  # it has nothing to do
        assert here.counts.warmups == {}


async def test_fleets_without_both_sides_are_left_alone() -> None:
    fleet = fleet_of(WorkerSpec("p0", "http://127.0.0.1:9", Role.PREFILL, "tiny"))
    router = router_of(*[worker.spec for worker in fleet])
    counts = HandoverCounters(str)
    task = asyncio.create_task(
        Warmup(router, connector(TransferConfig(connector="nixl")), counts).run()
    )
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert counts.warmups == {}

"""Warm-up of links between prefill and decode workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import pytest

from proxy.config import TransferConfig
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome
from proxy.core.router import Router
from proxy.health import warmup as module
from proxy.health.warmup import RETRY_S, Warmup
from proxy.metrics.handovers import HandoverCounters
from proxy.transfer.nixl import Nixl
from proxy.transfer.registry import connector
from tests.proxy.core.making import make_info, placed, router_of, worker_of
from tests.proxy.running import serving
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.kv import Faults, Kv
from tests.proxy.wire.site import eventually


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again after 10 ms."""
    monkeypatch.setattr(module, "PAUSE_S", 0.01)


class WarmupSite:
    """Prefill and decode workers, a router and its warm-up."""

    def __init__(self, kv: Kv, fakes: dict[str, FakeWorker], router: Router, name: str) -> None:
        self.kv, self.fakes, self.router = kv, fakes, router
        self.counts = HandoverCounters(str)
        config = TransferConfig.model_validate({"connector": name})
        self.warmup = Warmup(router, connector(config), self.counts)

    def worker(self, name: str) -> Worker:
        return worker_of(self.router, name)

    def are_warm(self, *pairs: tuple[str, str]) -> bool:
        links = self.router.placer.links
        return all(links.is_warm(self.worker(p), self.worker(d)) for p, d in pairs)

    def is_cold(self, prefill: str, decode: str) -> bool:
        """Return whether a prompt is served whole because the link is cold."""
        first, second = self.worker(prefill), self.worker(decode)
        info = replace(make_info(5000), model=first.model)
        lease = placed(self.router.submit(info, 0.0))
        self.router.leases.finish(lease, 0.0, Outcome.MOOT)
        assert (lease.prefill is None) == self.router.placer.links.is_cold(first, second)
        return lease.prefill is None

    def skip(self, seconds: float) -> None:
        now = self.warmup.clock() + seconds
        self.warmup.clock = lambda: now

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.warmup.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def start_site(
    prefills: int = 1, decodes: int = 1, name: str = "nixl", api_key: str | None = None
) -> AsyncIterator[WarmupSite]:
    kv = Kv()
    roles = {f"p{n}": Role.PREFILL for n in range(prefills)}
    roles |= {f"d{n}": Role.DECODE for n in range(decodes)}
    fakes = {name: FakeWorker(name) for name in roles}
    async with serving(*fakes.values()):
        for fake in fakes.values():
            fake.always(kv.worker(fake, roles[fake.name].value))
        specs = (
            WorkerSpec(fake.name, fake.url, roles[fake.name], "tiny", api_key=api_key)
            for fake in fakes.values()
        )
        yield WarmupSite(kv, fakes, router_of(*specs, transfer=True, disaggregate_above=1), name)
    assert kv.faults == []
    assert kv.held == []


async def test_each_link_is_warmed_once_and_again_after_a_restart() -> None:
    async with start_site(2, 2, api_key="hush") as site:
        pairs = [(p, d) for p in ("p0", "p1") for d in ("d0", "d1")]
        assert site.router.placer.links.is_cold(site.worker("p0"), site.worker("d0"))
        async with site.running():
            await eventually(lambda: site.are_warm(*pairs))
            await asyncio.sleep(0.3)
            assert site.counts.warmups == {"done": 4}
            site.worker("d0").up_since = 99.0
            assert not site.are_warm(("p0", "d0"))
            await eventually(lambda: site.are_warm(*pairs))
        assert site.counts.warmups == {"done": 6}
        assert site.kv.ends() == ["read"] * 6
        assert len({blocks.prompt for blocks in site.kv.pinned}) == 6  # no prompt is cached
        keys = [call.all(b"authorization") for fake in site.fakes.values() for call in fake.served]
        assert keys == [[b"Bearer hush"]] * 12


def fail_legs(kv: Kv, times: int) -> None:
    """Let this number of decode legs fail; their blocks are released."""
    leg, release = Faults(before=scripts.error(500)), Faults()
    kv.inject("decode", *[leg, release] * times)


async def test_failed_link_stays_cold_and_is_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_RETRY_S", 3 * RETRY_S)
    async with start_site() as site:
        fail_legs(site.kv, 5)
        prefill = site.worker("p0")
        note = "prefills nothing for d0 yet: the first transfer failed"
        async with site.running():
            assert site.is_cold("p0", "d0")
            for number, pause_s in enumerate((RETRY_S, 2 * RETRY_S, 3 * RETRY_S), 1):
                await eventually(lambda n=number: site.counts.bars == {("p0", "d0"): n})  # type: ignore[misc]
                # Three tries at first, then single ones.
                assert site.counts.warmups == {"failed": 2 + number}
                assert site.is_cold("p0", "d0")
                assert site.router.placer.links.describe(prefill, 0.0) == note
                assert "the first transfer failed: d0: status 500" in caplog.text
                assert f"the next try is in {pause_s:g} s" in caplog.text
                site.skip(pause_s)
            await eventually(lambda: site.are_warm(("p0", "d0")))
        assert site.counts.warmups == {"failed": 5, "done": 1}
        assert not site.is_cold("p0", "d0")
        assert site.router.placer.links.describe(prefill, 0.0) == ""
        assert site.kv.ends() == ["released"] * 5 + ["read"]


async def test_failing_connector_is_retried_like_a_failed_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bytes:
        raise KeyError("unforeseen")

    monkeypatch.setattr(Nixl, "request_id", fail)
    async with start_site() as site, site.running():
        await eventually(lambda: site.counts.bars == {("p0", "d0"): 1})
        assert site.is_cold("p0", "d0")
    assert caplog.text.count("KeyError: 'unforeseen'") == site.counts.warmups["failed"] == 3


async def test_restarted_worker_is_retried_at_once() -> None:
    async with start_site() as site:
        fail_legs(site.kv, 3)
        async with site.running():
            await eventually(lambda: site.counts.bars)
            site.worker("d0").up_since = 99.0
            await eventually(lambda: site.are_warm(("p0", "d0")))
        assert site.counts.warmups == {"failed": 3, "done": 1}


async def test_link_counts_as_warm_if_the_router_has_no_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with start_site() as site:
        site.fakes["p0"].always(scripts.error(401))
        async with site.running():
            await eventually(lambda: site.are_warm(("p0", "d0")))
        assert site.counts.warmups == {"no_key": 1}
        assert not site.counts.bars
        assert "p0 requires a key (status 401), and the router has none" in caplog.text


async def respond_bare(call: Call) -> None:
    """Respond without transfer parameters."""
    body = json.loads(call.body)
    assert (body["max_tokens"], body["ignore_eos"]) == (1, True)
    await scripts.answer(200, b'{"choices": []}')(call)


ELSEWHERE = (b"location", b"/elsewhere")


@pytest.mark.parametrize(
    ("script", "outcome", "message"),
    [
        pytest.param(scripts.error(401), "failed", "p0: status 401", id="refused key"),
        pytest.param(
            scripts.answer(307, b"", ELSEWHERE), "failed", "p0: status 307", id="redirect"
        ),
        pytest.param(respond_bare, "bare", "p0 returned no transfer parameters", id="bare"),
    ],
)
async def test_other_response_to_the_first_leg_keeps_the_link_cold(
    caplog: pytest.LogCaptureFixture, script: Script, outcome: str, message: str
) -> None:
    async with start_site(api_key="hush") as site:
        site.fakes["p0"].always(script)
        async with site.running():
            await eventually(lambda: site.counts.bars)
        assert site.counts.warmups == {outcome: 3}
        assert site.is_cold("p0", "d0")
        assert message in caplog.text
        assert {call.path for call in site.fakes["p0"].served} == {"/v1/completions"}
        assert site.fakes["d0"].served == []


async def test_doubt_of_the_connector_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nixl, "warning", lambda *_: "reports an impossible value")
    async with start_site() as site:
        async with site.running():
            await eventually(lambda: site.are_warm(("p0", "d0")))
        assert "p0 reports an impossible value" in caplog.text


# Workers that compute the prompt themselves


def count_fetches(fake: FakeWorker, *, fetches: bool) -> None:
    """Serve metrics with the number of fetched tokens; it stays 0 without fetches."""
    metric = b'vllm:num_requests_running{engine="0"} 0\n%b{engine="0",model_name="m"} %d.0\n'

    async def page(call: Call) -> None:
        number = 100 * len(fake.served) * fetches
        text = metric % (b"vllm:external_prefix_cache_hits_total", number)
        await scripts.answer(body=text, content_type=b"text/plain")(call)

    fake.always(page, "/metrics")


async def test_link_without_fetches_is_barred(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is correct, because the decode worker computes the prompt itself."""
    monkeypatch.setattr(module, "COUNT_WAIT_S", 0.01)
    async with start_site(decodes=2) as site:
        count_fetches(site.fakes["d0"], fetches=False)
        count_fetches(site.fakes["d1"], fetches=True)
        links, now = site.router.placer.links, site.warmup.clock
        first, dead, healthy = (site.worker(name) for name in ("p0", "d0", "d1"))
        async with site.running():
            await eventually(lambda: site.counts.bars == {("p0", "d0"): 1}, within=30.0)
            await eventually(lambda: site.are_warm(("p0", "d1")), within=30.0)
            assert links.is_unusable(first, dead, now())
            assert not site.are_warm(("p0", "d0"))
            assert "p0 to d0: the decode worker computed the prompt itself" in caplog.text
            assert site.counts.warmups == {"recomputed": 3, "done": 1}
            assert not links.is_unusable(first, healthy, now())
            # A minute later, the link works.
            count_fetches(site.fakes["d0"], fetches=True)
            site.skip(RETRY_S)
            await eventually(lambda: site.are_warm(("p0", "d0")), within=30.0)
        assert not links.is_unusable(first, dead, now())


async def test_missing_fetch_count_is_not_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 60.0)  # a single try
    monkeypatch.setattr(module, "COUNT_WAIT_S", 0.01)
    async with start_site() as site:
        fake, pages = site.fakes["d0"], count()
        metric = b'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 0.0\n'

        async def page(call: Call) -> None:
            good = scripts.answer(body=metric, content_type=b"text/plain")
            await (scripts.error(500) if next(pages) % 2 else good)(call)

        fake.always(page, "/metrics")
        async with site.running():
            await eventually(lambda: site.counts.warmups, within=30.0)
        assert "done" not in site.counts.warmups


async def test_hung_worker_delays_only_its_own_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONCURRENT", 1)
    monkeypatch.setattr(module, "LEG_TIMEOUT_S", 0.3)
    monkeypatch.setattr(module, "PAUSE_S", 60.0)
    async with start_site(decodes=2) as site:
        site.kv.inject("d0", Faults(before=scripts.stall))
        async with site.running():
            await eventually(lambda: site.are_warm(("p0", "d1")))
            assert site.counts.warmups == {"failed": 1, "done": 1}


@pytest.mark.parametrize(("name", "role"), [("p0", "prefill"), ("d0", "decode")])
async def test_stop_lets_a_try_finish(name: str, role: str) -> None:
    """Otherwise the prefill worker holds the blocks until their lease ends."""
    opening = asyncio.Event()
    async with start_site() as site:
        fake = site.fakes[name]
        fake.always(scripts.gated(opening, site.kv.worker(fake, role)))
        async with site.running():
            await fake.got(1)
            asyncio.get_running_loop().call_later(0.2, opening.set)
        assert site.kv.ends() == ["read"]


async def test_stop_does_not_wait_for_a_hung_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FINISH_S", 0.2)
    async with start_site() as site:
        site.kv.inject("d0", *[Faults(before=scripts.stall)] * 2)
        async with asyncio.timeout(10.0), site.running():
            await site.fakes["d0"].got(1)
        for blocks in site.kv.held:
            blocks.end = "expired"


# Cost of the search for cold links


@pytest.mark.plain("replaces a part")
async def test_warm_links_are_not_checked_again() -> None:
    specs = [WorkerSpec(f"p{n}", "http://h", Role.PREFILL, "tiny") for n in range(20)]
    specs += [WorkerSpec(f"d{n}", "http://h", Role.DECODE, "tiny") for n in range(20)]
    router = router_of(*specs, transfer=True)
    nixl = connector(TransferConfig(connector="nixl"))
    warmup = Warmup(router, nixl, HandoverCounters(str))
    checked: list[object] = []
    knows = router.placer.links.is_warm
    router.placer.links.is_warm = lambda *pair: checked.append(pair) or knows(*pair)  # type: ignore[method-assign,func-returns-value]
    pairs = [*warmup._links_to_make(0.0)]
    assert len(pairs) == 400
    for pair in pairs:
        router.placer.links.set_warm(*pair)
    assert [*warmup._links_to_make(0.0)] == []
    checked.clear()
    assert [*warmup._links_to_make(0.0)] == []
    assert checked == []
    decode = pairs[0][1]
    decode.up_since = 99.0
    assert [*warmup._links_to_make(0.0)] == [(p, d) for p, d in pairs if d is decode]
    router.fleet.roster.remove("p0")
    assert all(p.name != "p0" for p, _ in warmup._links_to_make(0.0))
    assert not knows(*pairs[1])  # links of p0 are forgotten


async def test_connector_without_handshake_needs_no_warmup() -> None:
    async with start_site(name="shared-storage") as site:
        assert not site.is_cold("p0", "d0")
        await site.warmup.run()  # returns at once
        assert site.counts.warmups == {}


async def test_fleet_without_both_sides_needs_no_warmup() -> None:
    async with start_site(decodes=0) as site:
        async with site.running():
            await asyncio.sleep(0.3)
        assert site.counts.warmups == {}

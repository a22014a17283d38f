"""The fleet beside what is discovered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.config import DiscoveryConfig, PoolConfig, parse
from proxy.core.fleet.charges import Fleet
from proxy.core.router import Router, RouterSettings
from proxy.discovery import discovery as module
from proxy.discovery.discovery import Discovery, source
from proxy.discovery.dns import DnsSource
from proxy.discovery.endpoints import EndpointListener
from proxy.discovery.kubernetes import KubernetesSource
from proxy.discovery.reconcile import keys_of
from proxy.errors import ProxyError
from tests.proxy.core.making import chat, read, refused, sized
from tests.proxy.discovery.test_reconcile import endpoints

DEADLINE_S = 15.0
POOLS = """
model: tiny
discovery:
  pools:
    - {name: short, role: short, selector: pool=short, max_model_len: 20000, max_requests: 7,
       api_key: hush}
    - {name: long, role: long, selector: pool=long, model: other}
"""


class FakeSource:
    """One that says what the test has it say."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.runs = 0

    async def run(self, listener: EndpointListener) -> None:
        assert listener is not None
        self.runs += 1
        await asyncio.Event().wait()


@dataclass
class Site:
    """A fleet, and what is discovered."""

    fleet: Fleet = field(default_factory=lambda: Fleet(down_after=1, up_after=1))
    sources: list[FakeSource] = field(default_factory=list)
    discovery: Discovery = field(init=False)

    def start(self, text: str = POOLS) -> None:
        """Begin with a fleet file."""
        from proxy.setup.settings import specs, worker_spec

        config = parse(text, "fleet.yaml")
        for spec in specs(config):
            self.fleet.roster.add(spec)
        self.discovery = Discovery(
            self.fleet.roster, config, keys_of(config), worker_spec, self._source
        )

    def _source(self, _: DiscoveryConfig, pool: PoolConfig) -> FakeSource:
        self.sources.append(FakeSource(pool.name))
        return self.sources[-1]

    def update(self, *names: str, pool: int = 0, **how: Any) -> None:
        """Tell of a pool's workers."""
        self.discovery.pools[pool].update(endpoints(*names, **how))

    def reload(self, text: str) -> None:
        """Take a new fleet file as the app does."""
        from proxy.app import specs

        config = parse(text, "fleet.yaml")
        found = self.discovery.reconfigure(config, keys_of(config))
        self.fleet.roster.replace([*found, *specs(config)])
        self.discovery.reloaded()

    @property
    def names(self) -> list[str]:
        return [worker.name for worker in self.fleet.roster]

    def draining(self, name: str) -> bool:
        worker = self.fleet.roster.get(name)
        assert worker is not None
        return worker.draining

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run it for as long as the block lasts."""
        task = asyncio.create_task(self.discovery.run())
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def site() -> Site:
    made = Site()
    made.start()
    return made


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110 - the fleet tells nobody of its changes
            await asyncio.sleep(0.005)


def test_one_that_is_found_is_what_its_pool_says(site: Site) -> None:
    site.update("s-1")
    site.update("l-2", pool=1)
    short, long = site.fleet.roster
    assert (short.name, short.url, short.role) == ("s-1", "http://10.0.0.1:8000", "short")
    assert (short.model, short.max_model_len, short.spec.max_requests) == ("tiny", 20000, 7)
    assert short.spec.api_key == "hush"
    assert (long.name, long.role, long.model, long.spec.api_key) == ("l-2", "long", "other", None)


def test_the_models_of_pools_are_known_while_nobody_is_there(site: Site) -> None:
    router = Router(RouterSettings(), site.fleet)
    for model in ("tiny", "other"):
        refusal = refused(router.submit(sized(router, {"model": model, **chat("x")}), 0.0))
        assert (refusal.status, refusal.code) == (503, "no_worker")
    # It may be an adapter of those who are to come: see there.
    assert refused(read(router, {"model": "third", **chat("x")})).status == 503
    site.update("s-1")
    site.update("s-1", leaving=True)
    site.update()
    assert site.names == []
    assert site.fleet.roster.serves("tiny")
    site.reload(POOLS.replace("model: other", "model: third"))
    assert site.fleet.roster.models() == ("tiny", "third")


def test_another_process_goes_on_from_what_one_knew(site: Site) -> None:
    site.update("s-1", "s-2")
    site.update("l-1", pool=1)
    site.update("s-1", "s-2", ready=False)
    site.discovery.pools[0].update({**endpoints("s-1"), **endpoints("s-2", ready=False)})
    other = Site(fleet=site.fleet)
    other.sources, config = [], parse(POOLS, "fleet.yaml")
    from proxy.setup.settings import worker_spec

    other.discovery = Discovery(
        other.fleet.roster, config, keys_of(config), worker_spec, other._source
    )
    other.discovery.adopt(site.discovery.known())
    workers = list(other.fleet.roster)
    other.update("s-1", "s-2")  # the other pool has yet to be heard of
    assert list(other.fleet.roster) == workers
    assert not other.draining("s-2")
    other.update("s-2")
    assert other.names == ["s-2", "l-1"]


def test_one_that_moved_is_another(site: Site) -> None:
    site.update("s-1", "s-2")
    before = site.fleet.roster.get("s-1")
    moved = {**endpoints("s-2"), "s-1": endpoints("s-9")["s-9"].__class__("s-1", "10.0.0.9", 8000)}
    site.discovery.pools[0].update(moved)
    after = site.fleet.roster.get("s-1")
    assert after is not None
    assert after.url == "http://10.0.0.9:8000"
    assert after is not before


def test_not_ready_ones_drain_and_come_back(site: Site) -> None:
    site.update("s-1", "s-2")
    site.discovery.pools[0].update(endpoints("s-1") | endpoints("s-2", ready=False))
    assert (site.draining("s-1"), site.draining("s-2")) == (False, True)
    site.update("s-1", "s-2")
    assert not site.draining("s-2")


def test_one_that_is_not_ready_yet_has_still_to_say_what_it_serves() -> None:
    site = Site()
    site.start(POOLS.replace("model: other", "model: tiny"))
    site.update("s-1")
    site.fleet.health.probe_ok("s-1", 1.0)
    assert site.fleet.roster.all_listed()
    site.discovery.pools[0].update(endpoints("s-1") | endpoints("s-2", ready=False))
    assert site.draining("s-2")
    assert not site.fleet.roster.all_listed()
    site.fleet.roster.drain("s-2")  # an operator
    assert site.fleet.roster.all_listed()


def test_what_an_operator_drained_stays_so(site: Site) -> None:
    site.update("s-1", "s-2")
    site.fleet.roster.drain("s-2")
    site.discovery.pools[0].update(endpoints("s-1") | endpoints("s-2", ready=False))
    site.update("s-1", "s-2")
    assert site.draining("s-2")


def test_what_an_operator_took_out_stays_out_until_a_reload(site: Site) -> None:
    site.update("s-1", "s-2")
    site.fleet.roster.remove("s-2")
    site.discovery.pools[0].update(endpoints("s-1") | endpoints("s-2", ready=False))
    site.update("s-1", "s-2")
    assert site.names == ["s-1"]
    site.reload(POOLS)
    assert sorted(site.names) == ["s-1", "s-2"]


def test_one_that_leaves_already_is_not_taken_in(site: Site) -> None:
    site.discovery.pools[0].update(endpoints("s-1") | endpoints("s-2", leaving=True))
    assert site.names == ["s-1"]


@pytest.mark.parametrize(
    "worker", ["{name: s-1, url: 'http://10.9.9.9'}", "{name: x, url: 'http://10.0.0.1:8000'}"]
)
def test_the_files_workers_come_first(worker: str) -> None:
    site = Site()
    site.start(POOLS + f"workers: [{worker}]\n")
    site.update("s-1", "s-2")
    assert len(site.names) == 2
    assert "s-2" in site.names
    site.update("s-2")
    assert len(site.names) == 2


def test_an_operator_s_namesake_is_kept(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    from proxy.core.model.role import Role
    from proxy.core.model.specs import WorkerSpec

    theirs = site.fleet.roster.add(WorkerSpec("s-1", "http://10.9.9.9:1", Role.SHORT, "tiny"))
    site.update("s-1", "s-2")
    site.update("s-1", "s-2", ready=False)
    assert site.fleet.roster.get("s-1") is theirs
    assert len([r for r in caplog.records if "is already in the fleet" in r.message]) == 1
    site.update("s-2")
    assert site.fleet.roster.get("s-1") is theirs


def test_a_pod_of_two_pools_is_the_firsts(site: Site) -> None:
    site.update("s-1")
    site.update("s-1", pool=1)
    assert [worker.role for worker in site.fleet.roster] == ["short"]


def test_an_unusable_address_disturbs_nobody(site: Site) -> None:
    odd = endpoints("s-1")["s-1"].__class__("s-3", "fe80::1%eth0", 8000)
    site.discovery.pools[0].update({**endpoints("s-1"), "s-3": odd})
    assert site.names == ["s-1"]


def test_a_reload_gives_found_workers_what_the_file_now_says(site: Site) -> None:
    site.update("s-1", "s-2")
    site.discovery.pools[0].update(endpoints("s-1") | endpoints("s-2", ready=False))
    worker = site.fleet.roster.get("s-1")
    site.reload(POOLS.replace("max_requests: 7", "max_requests: 9"))
    assert site.fleet.roster.get("s-1") is worker
    assert worker is not None
    assert worker.spec.max_requests == 9
    assert (site.draining("s-1"), site.draining("s-2")) == (False, True)
    assert len(site.sources) == 2, "they are looked for as before"
    site.update("s-2")
    assert site.names == ["s-2"]


def test_a_reload_of_another_model_makes_another_worker_that_drains_as_before(site: Site) -> None:
    site.discovery.pools[0].update(endpoints("s-1") | endpoints("s-2", ready=False))
    site.reload(POOLS.replace("model: tiny", "model: big"))
    assert {worker.model for worker in site.fleet.roster} == {"big"}
    assert (site.draining("s-1"), site.draining("s-2")) == (False, True)


def test_a_pool_that_is_left_out_takes_its_workers_with_it(site: Site) -> None:
    site.update("s-1")
    site.update("l-2", pool=1)
    site.reload(POOLS.partition("    - {name: long")[0])
    assert site.names == ["s-1"]
    site.reload("model: tiny\nworkers: [{name: a, url: 'http://a'}]\n")
    assert site.names == ["a"]


def test_a_reload_that_can_not_be_taken_changes_nothing(site: Site, tmp_path: Path) -> None:
    site.update("s-1")
    text = POOLS.replace("api_key: hush", f"api_key_file: {tmp_path / 'none'}")
    with pytest.raises(ProxyError, match="pool short: api_key_file"):
        site.reload(text.replace("max_requests: 7", "max_requests: 9"))
    site.update("s-1", "s-2")
    worker = site.fleet.roster.get("s-2")
    assert worker is not None
    assert worker.spec.max_requests == 7


async def test_kept_workers_stay_while_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)
    site.update("s-1", "s-2")
    for name in site.names:
        site.fleet.health.probe_ok(name, 0.0)
    async with site.running():
        site.update()
        assert site.names == ["s-1", "s-2"]
        assert not site.draining("s-1")
        site.fleet.health.probe_failed("s-1", 1.0)
        await until(lambda: site.names == ["s-2"])
        site.fleet.health.probe_failed("s-2", 1.0)
        await until(lambda: site.names == [])


async def test_sources_follow_the_file(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)
    async with site.running():
        await until(lambda: [each.runs for each in site.sources] == [1, 1])
        site.reload(POOLS.replace("pool=long", "pool=longer"))
        await until(lambda: [each.runs for each in site.sources] == [1, 1, 1])
        assert len(site.discovery._tasks) == 2


async def test_a_failed_source_is_restarted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)
    runs = asyncio.Event()

    async def fail(listener: EndpointListener) -> None:
        if site.sources[0].runs:
            runs.set()
            await asyncio.Event().wait()
        site.sources[0].runs += 1
        raise RuntimeError(str(listener))

    site.sources[0].run = fail  # type: ignore[method-assign]
    async with site.running(), asyncio.timeout(DEADLINE_S):
        await runs.wait()


def test_who_knows_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    named = PoolConfig(name="a", dns="a.b")
    labelled = PoolConfig(name="a", selector="a=b")
    assert isinstance(source(DiscoveryConfig(pools=(named,)), named), DnsSource)
    with pytest.raises(ProxyError, match="does not run in a pod"):
        source(DiscoveryConfig(pools=(labelled,)), labelled)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert isinstance(source(DiscoveryConfig(pools=(labelled,)), labelled), KubernetesSource)

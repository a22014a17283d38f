"""Discovered workers in the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from proxy.config import DiscoveryConfig, PoolConfig, parse
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.router import Router, RouterSettings
from proxy.discovery import discovery as module
from proxy.discovery.discovery import Discovery, source
from proxy.discovery.dns import DnsSource
from proxy.discovery.endpoints import Endpoint
from proxy.discovery.kubernetes import KubernetesSource
from proxy.discovery.reconcile import DiscoveredPool, keys_of
from proxy.errors import ProxyError
from proxy.setup.settings import specs, worker_spec
from tests.present import present
from tests.proxy.core.making import chat, read, refused, sized
from tests.proxy.discovery.test_reconcile import endpoints
from tests.proxy.wire.site import eventually

POOLS = """
model: tiny
discovery:
  pools:
    - {name: short, role: short, selector: pool=short, max_model_len: 20000, max_requests: 7,
       api_key: hush}
    - {name: long, role: long, selector: pool=long, model: other}
"""


class FakeSource:
    """A source without events; tests update pools themselves."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.runs = 0

    async def run(self, listener: DiscoveredPool) -> None:
        assert listener is not None
        self.runs += 1
        await asyncio.Event().wait()


@dataclass
class DiscoverySite:
    fleet: Fleet = field(default_factory=lambda: Fleet(down_after=1, up_after=1))
    sources: list[FakeSource] = field(default_factory=list)
    discovery: Discovery = field(init=False)

    def start(self, text: str = POOLS) -> None:
        config = parse(text, "fleet.yaml")
        for spec in specs(config):
            self.fleet.roster.add(spec)
        self.discovery = Discovery(
            self.fleet.roster, config, keys_of(config), worker_spec, self._source
        )

    def _source(self, _: DiscoveryConfig, pool: PoolConfig) -> FakeSource:
        self.sources.append(FakeSource(pool.name))
        return self.sources[-1]

    def update(self, *names: str, pool: int = 0, not_ready: str = "", leaving: str = "") -> None:
        """Report a pool's endpoints, of which one may be not ready or leaving."""
        found = endpoints(*names)
        if not_ready:
            found |= endpoints(not_ready, ready=False)
        if leaving:
            found |= endpoints(leaving, leaving=True)
        self.discovery.pools[pool].update(found)

    def reload(self, text: str) -> None:
        """Apply a fleet file as the app does."""
        config = parse(text, "fleet.yaml")
        found = self.discovery.reconfigure(config, keys_of(config))
        self.fleet.roster.replace([*found, *specs(config)])
        self.discovery.reloaded()

    @property
    def names(self) -> list[str]:
        return [worker.name for worker in self.fleet.roster]

    def worker(self, name: str) -> Worker:
        return present(self.fleet.roster.get(name))

    def draining(self, name: str) -> bool:
        return self.worker(name).draining

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.discovery.run())
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def site() -> DiscoverySite:
    site = DiscoverySite()
    site.start()
    return site


@pytest.fixture(autouse=True)
def _short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)


def test_discovered_worker_has_the_settings_of_its_pool(site: DiscoverySite) -> None:
    site.update("s-1")
    site.update("l-2", pool=1)
    short, long = site.fleet.roster
    assert (short.name, short.url, short.role) == ("s-1", "http://10.0.0.1:8000", "short")
    assert (short.model, short.max_model_len, short.spec.max_requests) == ("tiny", 20000, 7)
    assert short.spec.api_key == "hush"
    assert (long.name, long.role, long.model, long.spec.api_key) == ("l-2", "long", "other", None)


def test_models_of_empty_pools_are_known(site: DiscoverySite) -> None:
    router = Router(RouterSettings(), site.fleet)
    for model in ("tiny", "other"):
        refusal = refused(router.submit(sized(router, {"model": model, **chat("x")}), 0.0))
        assert (refusal.status, refusal.code) == (503, "no_worker")
    # An unknown model may be an adapter of workers that are not discovered yet.
    assert refused(read(router, {"model": "third", **chat("x")})).status == 503
    site.update("s-1")
    site.update(leaving="s-1")
    site.update()
    assert site.names == []
    assert site.fleet.roster.serves("tiny")
    site.reload(POOLS.replace("model: other", "model: third"))
    assert site.fleet.roster.models() == ("tiny", "third")


def test_discovery_adopts_workers_of_another_process(site: DiscoverySite) -> None:
    site.update("s-1", "s-2")
    site.update("l-1", pool=1)
    site.discovery.pools[0].update(endpoints("s-1", "s-2", ready=False))
    site.update("s-1", not_ready="s-2")
    other = DiscoverySite(fleet=site.fleet)
    other.start()
    other.discovery.adopt(site.discovery.endpoints_by_pool())
    workers = list(other.fleet.roster)
    other.update("s-1", "s-2")  # the other pool is not reported yet
    assert list(other.fleet.roster) == workers
    assert not other.draining("s-2")
    other.update("s-2")
    assert other.names == ["s-2", "l-1"]


def test_worker_with_a_new_address_is_a_new_worker(site: DiscoverySite) -> None:
    site.update("s-1", "s-2")
    before = site.worker("s-1")
    moved = {**endpoints("s-2"), "s-1": Endpoint("s-1", "10.0.0.9", 8000)}
    site.discovery.pools[0].update(moved)
    assert site.worker("s-1").url == "http://10.0.0.9:8000"
    assert site.worker("s-1") is not before


def test_worker_that_is_not_ready_drains(site: DiscoverySite) -> None:
    site.update("s-1", "s-2")
    site.update("s-1", not_ready="s-2")
    assert (site.draining("s-1"), site.draining("s-2")) == (False, True)
    site.update("s-1", "s-2")
    assert not site.draining("s-2")


def test_worker_that_is_not_ready_yet_has_no_model_list() -> None:
    site = DiscoverySite()
    site.start(POOLS.replace("model: other", "model: tiny"))
    site.update("s-1")
    site.fleet.health.probe_ok("s-1", 1.0)
    assert site.fleet.roster.all_listed()
    site.update("s-1", not_ready="s-2")
    assert site.draining("s-2")
    assert not site.fleet.roster.all_listed()
    site.fleet.roster.drain("s-2")  # by an operator
    assert site.fleet.roster.all_listed()


def test_drain_by_an_operator_is_kept(site: DiscoverySite) -> None:
    site.update("s-1", "s-2")
    site.fleet.roster.drain("s-2")
    site.update("s-1", not_ready="s-2")
    site.update("s-1", "s-2")
    assert site.draining("s-2")


def test_pool_of_a_worker_is_known_while_it_is_discovered(site: DiscoverySite) -> None:
    site.fleet.roster.add(WorkerSpec("s-3", "http://10.9.9.9:1", Role.SHORT, "tiny"))
    site.update("s-1", "s-2", "s-3")
    pool_of = site.discovery.pool_of
    assert [pool_of(name) for name in ("s-1", "s-2", "s-3", "x")] == ["short", "short", "", ""]
    site.update("s-1")
    assert pool_of("s-2") == ""


def test_leaving_endpoint_is_not_added(site: DiscoverySite) -> None:
    site.update("s-1", leaving="s-2")
    assert site.names == ["s-1"]


@pytest.mark.parametrize(
    "worker", ["{name: s-1, url: 'http://10.9.9.9'}", "{name: x, url: 'http://10.0.0.1:8000'}"]
)
def test_workers_of_the_fleet_file_have_precedence(worker: str) -> None:
    site = DiscoverySite()
    site.start(POOLS + f"workers: [{worker}]\n")
    site.update("s-1", "s-2")
    assert len(site.names) == 2
    assert "s-2" in site.names
    site.update("s-2")
    assert len(site.names) == 2


def test_worker_added_by_an_operator_has_precedence(
    site: DiscoverySite, caplog: pytest.LogCaptureFixture
) -> None:
    added = site.fleet.roster.add(WorkerSpec("s-1", "http://10.9.9.9:1", Role.SHORT, "tiny"))
    site.update("s-1", "s-2")
    site.discovery.pools[0].update(endpoints("s-1", "s-2", ready=False))
    assert site.worker("s-1") is added
    assert len([r for r in caplog.records if "is already in the fleet" in r.message]) == 1
    site.update("s-2")
    assert site.worker("s-1") is added


def test_pod_in_two_pools_belongs_to_the_first(site: DiscoverySite) -> None:
    site.update("s-1")
    site.update("s-1", pool=1)
    assert [worker.role for worker in site.fleet.roster] == ["short"]


def test_unusable_address_is_skipped(site: DiscoverySite) -> None:
    invalid = Endpoint("s-3", "fe80::1%eth0", 8000)
    site.discovery.pools[0].update({**endpoints("s-1"), "s-3": invalid})
    assert site.names == ["s-1"]


def test_reload_updates_discovered_workers(site: DiscoverySite) -> None:
    site.update("s-1", "s-2")
    site.update("s-1", not_ready="s-2")
    worker = site.worker("s-1")
    site.reload(POOLS.replace("max_requests: 7", "max_requests: 9"))
    assert site.worker("s-1") is worker
    assert worker.spec.max_requests == 9
    assert (site.draining("s-1"), site.draining("s-2")) == (False, True)
    assert len(site.sources) == 2, "the sources are kept"
    site.update("s-2")
    assert site.names == ["s-2"]


def test_journal_follows_the_endpoint(site: DiscoverySite) -> None:
    site.update("s-1")
    worker = site.worker("s-1")
    assert worker.spec.journal == ()
    (found,) = endpoints("s-1").values()
    for port, journal in ((5700, ("tcp://10.0.0.1:5700",)), (None, ())):
        site.discovery.pools[0].update({"s-1": replace(found, journal_port=port)})
        assert site.worker("s-1") is worker
        assert worker.spec.journal == journal
        site.reload(POOLS)
        assert worker.spec.journal == journal


def test_reload_with_another_model_keeps_draining(site: DiscoverySite) -> None:
    site.update("s-1", not_ready="s-2")
    site.reload(POOLS.replace("model: tiny", "model: big"))
    assert {worker.model for worker in site.fleet.roster} == {"big"}
    assert (site.draining("s-1"), site.draining("s-2")) == (False, True)


def test_reload_without_a_pool_removes_its_workers(site: DiscoverySite) -> None:
    site.update("s-1")
    site.update("l-2", pool=1)
    site.reload(POOLS.partition("    - {name: long")[0])
    assert site.names == ["s-1"]
    site.reload("model: tiny\nworkers: [{name: a, url: 'http://a'}]\n")
    assert site.names == ["a"]


def test_failed_reload_changes_nothing(site: DiscoverySite, tmp_path: Path) -> None:
    site.update("s-1")
    text = POOLS.replace("api_key: hush", f"api_key_file: {tmp_path / 'none'}")
    with pytest.raises(ProxyError, match="pool short: api_key_file"):
        site.reload(text.replace("max_requests: 7", "max_requests: 9"))
    site.update("s-1", "s-2")
    assert site.worker("s-2").spec.max_requests == 7


async def test_vanished_workers_stay_while_up(site: DiscoverySite) -> None:
    site.update("s-1", "s-2")
    for name in site.names:
        site.fleet.health.probe_ok(name, 0.0)
    async with site.running():
        site.update()
        assert site.names == ["s-1", "s-2"]
        assert not site.draining("s-1")
        site.fleet.health.probe_failed("s-1")
        await eventually(lambda: site.names == ["s-2"])
        site.fleet.health.probe_failed("s-2")
        await eventually(lambda: site.names == [])


async def test_reload_restarts_changed_sources(site: DiscoverySite) -> None:
    async with site.running():
        await eventually(lambda: [source.runs for source in site.sources] == [1, 1])
        site.reload(POOLS.replace("pool=long", "pool=longer"))
        await eventually(lambda: [source.runs for source in site.sources] == [1, 1, 1])
        assert len(site.discovery._tasks) == 2


async def test_failed_source_is_restarted(site: DiscoverySite) -> None:
    first = site.sources[0]
    run = first.run

    async def fail_once(listener: DiscoveredPool) -> None:
        first.run = run  # type: ignore[method-assign]
        raise RuntimeError(str(listener))

    first.run = fail_once  # type: ignore[method-assign]
    async with site.running():
        await eventually(lambda: first.runs == 1)


def test_source_depends_on_the_pools_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    named = PoolConfig(name="a", dns="a.b")
    labelled = PoolConfig(name="a", selector="a=b")
    assert isinstance(source(DiscoveryConfig(pools=(named,)), named), DnsSource)
    with pytest.raises(ProxyError, match="does not run in a pod"):
        source(DiscoveryConfig(pools=(labelled,)), labelled)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert isinstance(source(DiscoveryConfig(pools=(labelled,)), labelled), KubernetesSource)

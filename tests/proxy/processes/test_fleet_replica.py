"""One process's workers in the others, however late they come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from proxy.config import parse
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.kv_links import KvLinks
from proxy.core.fleet.model_lists import MAX_MODEL_LIST_WAIT_S
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.router import Router, RouterSettings
from proxy.discovery.discovery import Discovery
from proxy.processes.fleet_replica import FleetReplica
from proxy.processes.shared import load as sharing_module
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.shared_memory import SharedTable
from proxy.setup.settings import worker_spec
from tests.proxy.core.making import spec

CONFIG = parse("model: m\nworkers: [{name: x, url: 'http://x'}]\n", "fleet.yaml")


class Process:
    """A router and its mirror."""

    def __init__(self, table: SharedTable, index: int) -> None:
        self.now = 1.0
        self.fleet = Fleet(clock=lambda: self.now)
        self.router = Router(RouterSettings(), self.fleet)
        self.later: list[Callable[[], None]] = []
        self.sharing = SharedLoad(table, index, self.fleet, lambda: self.now, self.later.append)
        self.fleet.roster.others = self.sharing
        discovery = Discovery(self.fleet.roster, CONFIG, {}, worker_spec)
        self.mirror = FleetReplica(self.router, discovery, self.sharing, lambda: self.now)

    def up(self, name: str) -> Worker:
        """Add a worker and find it well."""
        worker = self.fleet.roster.add(spec(name))
        self.fleet.health.probe_ok(name, self.now)
        return worker

    def worker(self, name: str) -> Worker:
        found = self.fleet.roster.get(name)
        assert found is not None
        return found

    @property
    def names(self) -> set[str]:
        return {worker.name for worker in self.fleet.roster}


@pytest.fixture
def pair() -> Iterator[tuple[Process, Process]]:
    """Make a leader and another."""
    table = SharedTable.make(3)
    leader, other = Process(table, 0), Process(table, 1)
    leader.mirror.lead()
    yield leader, other
    table.close()


def pass_on(leader: Process, *others: Process) -> bool:
    """Have the others told; whether there was anything."""
    told = leader.mirror.changes()
    if told is not None:
        for other in others:
            other.mirror.take(told)
    return told is not None


def test_workers_come_change_and_go(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    leader.fleet.roster.add(spec("b"))
    assert pass_on(leader, other)
    assert not pass_on(leader, other)
    assert other.names == {"a", "b"}
    assert (other.worker("a").up, other.worker("b").up) == (True, False)
    assert other.sharing.row(other.worker("b")) == leader.sharing.row(leader.worker("b"))
    leader.fleet.health.probe_ok("b", 2.0)
    leader.fleet.roster.drain("a")
    leader.fleet.roster.set_served("b", ("m", "adapter"), 4096, {"adapter": ("/a", "m")})
    leader.fleet.health.set_gauges("b", Gauges(at=2.0, kv_usage=0.5, kv_capacity_tokens=1000))
    assert pass_on(leader, other)
    b = other.worker("b")
    assert (b.up, b.models, b.max_model_len, b.kv_capacity) == (True, ("m", "adapter"), 4096, 1000)
    assert other.fleet.roster.origin("adapter") == ("/a", "m")
    leader.fleet.roster.set_served("b", ("m", "adapter"), 4096, {"adapter": ("/b", "m")})
    assert pass_on(leader, other)
    assert other.fleet.roster.origin("adapter") == ("/b", "m")
    leader.fleet.health.no_gauges("b", 100.0)
    assert pass_on(leader, other)
    assert b.gauges is None
    assert other.worker("a").draining
    assert [worker.name for worker in other.fleet.roster.pool("adapter").all] == ["b"]
    leader.fleet.roster.drain("a", draining=False)
    leader.fleet.roster.remove("b")
    for _ in range(3):
        leader.fleet.health.probe_failed("a", 3.0)
    pass_on(leader, other)
    assert other.names == {"a"}
    assert (other.worker("a").up, other.worker("a").draining) == (False, False)


def test_all_wait_for_who_never_comes_up_for_as_long(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.fleet.roster.add(spec("dead"))
    leader.now += MAX_MODEL_LIST_WAIT_S - 1
    other.now = leader.now  # a process that was started anew
    pass_on(leader, other)
    assert (leader.fleet.roster.all_listed(), other.fleet.roster.all_listed()) == (False, False)
    other.now = leader.now = leader.now + 1
    assert (leader.fleet.roster.all_listed(), other.fleet.roster.all_listed()) == (True, True)
    leader.fleet.roster.add(spec("late"))
    pass_on(leader, other)
    assert not other.fleet.roster.all_listed()
    leader.fleet.roster.drain("late")
    pass_on(leader, other)
    assert other.fleet.roster.all_listed()


def test_what_is_stated_of_one_may_change(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    pass_on(leader, other)
    before = other.worker("a")
    leader.fleet.roster.replace([spec("a", Role.LONG, 9000, 5)])
    pass_on(leader, other)
    assert other.worker("a") is before
    assert (before.role, before.max_model_len, before.max_requests) == (Role.LONG, 9000, 5)


def test_a_namesake_is_another(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    pass_on(leader, other)
    before = other.worker("a")
    before.requests = 3
    leader.fleet.roster.remove("a")
    leader.up("a")
    pass_on(leader, other)
    after = other.worker("a")
    assert after is not before
    assert other.sharing.row(after) == leader.sharing.row(leader.worker("a")) == 1
    assert after.requests == 3, "what it has in flight it has still"
    for tell in other.later:
        tell()
    leader.now += 1.0
    leader.sharing.look(leader.now)
    assert leader.worker("a").requests == 3


def test_many_that_change_at_once_are_one_change(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.fleet.roster.replace(spec(f"w{number}") for number in range(20))
    assert pass_on(leader, other)
    before = other.fleet.roster.version
    moved = [replace(spec(f"w{number}"), url="http://elsewhere") for number in range(10)]
    leader.fleet.roster.replace([*moved, *(spec(f"w{number}") for number in range(15, 30))])
    assert pass_on(leader, other)
    assert other.fleet.roster.version == before + 1
    assert [worker.spec for worker in other.fleet.roster] == [
        worker.spec for worker in leader.fleet.roster
    ]
    for worker in leader.fleet.roster:
        assert other.sharing.row(other.worker(worker.name)) == leader.sharing.row(worker)


def test_who_comes_late_is_told_everything(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    gone = leader.up("b")
    leader.worker("a").pace.saw_first_token(1000, 0, 0, 0.5, 1.0)
    leader.mirror.changes()
    leader.fleet.roster.remove(gone.name)
    other.fleet.roster.add(spec("c"))  # as its fleet file says, which is out of date
    leader.mirror.forget()
    pass_on(leader, other)
    assert other.names == {"a"}
    assert other.worker("a").pace.token_s == leader.worker("a").pace.token_s


def test_a_worker_that_was_started_anew_has_nothing_cached(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    pass_on(leader, other)
    other.fleet.roster.prefixes.record((1, 2, 3), other.worker("a").index)
    leader.fleet.health.set_gauges("a", Gauges(at=5.0))
    pass_on(leader, other)
    assert other.fleet.roster.prefixes.matches((1, 2, 3))
    leader.worker("a").up_since = 6.0
    pass_on(leader, other)
    assert not other.fleet.roster.prefixes.matches((1, 2, 3))


def test_another_goes_on_leading(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    for name in "ab":
        leader.up(name)
    pass_on(leader, other)
    rows = {name: other.sharing.row(other.worker(name)) for name in "ab"}
    other.mirror.lead()
    assert not {"a", "b"} - other.names
    other.up("c")
    told = other.mirror.changes()
    assert told is not None
    assert {known.spec.name: known.row for known in told.known} == {**rows, "c": 2}
    leader.mirror.take(told)  # were it a new one
    assert leader.sharing.row(leader.worker("c")) == 2


def test_what_is_connected_is_known_to_all(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    for process in pair:
        process.router.placer.links.are_made = True
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        leader.fleet.roster.add(spec(name, role))
        leader.fleet.health.probe_ok(name, 1.0)
    pass_on(leader, other)
    p, d = other.worker("p"), other.worker("d")
    assert other.router.placer.links.are_cold(p, d)
    leader.router.placer.links.warm(leader.worker("p"), leader.worker("d"))
    pass_on(leader, other)
    assert not other.router.placer.links.are_cold(p, d)
    with pytest.MonkeyPatch.context() as patch:  # nothing has changed: no pair is looked at
        patch.setattr(KvLinks, "knows", lambda *_: pytest.fail("looked"))
        assert not pass_on(leader, other)
    leader.fleet.roster.remove("d")
    pass_on(leader, other)
    assert not other.router.placer.links.knows(p, d)
    assert not leader.mirror._warm


def test_more_workers_than_rows_are_said(
    pair: tuple[Process, Process],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, other = pair
    monkeypatch.setattr(sharing_module.WorkerRows, "of", lambda *_: None)
    leader.up("a")
    with caplog.at_level(logging.ERROR):
        assert pass_on(leader, other)
        assert not pass_on(leader, other)
    assert caplog.text.count("are not shared") == 1
    assert other.names == {"a"}
    assert other.sharing.row(other.worker("a")) is None

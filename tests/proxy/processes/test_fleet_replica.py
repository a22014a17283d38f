"""Replicas of the leader's fleet in other processes."""

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
from proxy.core.learned.latency import PrefillWork
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.router import Router, RouterSettings
from proxy.discovery.discovery import Discovery
from proxy.processes.fleet_replica import FleetReplica
from proxy.processes.shared import load as sharing_module
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.shared_memory import SharedTable
from proxy.setup.settings import worker_spec
from tests.present import present
from tests.proxy.core.making import spec

CONFIG = parse("model: m\nworkers: [{name: x, url: 'http://x'}]\n", "fleet.yaml")


class Process:
    def __init__(self, table: SharedTable, index: int) -> None:
        self.now = 1.0
        self.fleet = Fleet(clock=lambda: self.now)
        self.router = Router(RouterSettings(), self.fleet)
        self.callbacks: list[Callable[[], None]] = []
        self.shared_load = SharedLoad(
            table, index, self.fleet, lambda: self.now, self.callbacks.append
        )
        self.fleet.roster.remote_load = self.shared_load
        discovery = Discovery(self.fleet.roster, CONFIG, {}, worker_spec)
        self.replica = FleetReplica(self.router, discovery, self.shared_load, lambda: self.now)

    def up(self, name: str) -> Worker:
        """Add a worker with a good probe."""
        worker = self.fleet.roster.add(spec(name))
        self.fleet.health.probe_ok(name, self.now)
        return worker

    def worker(self, name: str) -> Worker:
        return present(self.fleet.roster.get(name))

    @property
    def names(self) -> set[str]:
        return {worker.name for worker in self.fleet.roster}


@pytest.fixture
def pair() -> Iterator[tuple[Process, Process]]:
    table = SharedTable.make(3)
    leader, other = Process(table, 0), Process(table, 1)
    leader.replica.lead()
    yield leader, other
    table.close()


def send_changes(leader: Process, *others: Process) -> bool:
    """Send the leader's changes to the others; return whether there were any."""
    changes = leader.replica.changes()
    if changes is not None:
        for other in others:
            other.replica.apply(changes)
    return changes is not None


def test_added_changed_and_removed_workers_are_replicated(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    leader.fleet.roster.add(spec("b"))
    assert send_changes(leader, other)
    assert not send_changes(leader, other)
    assert other.names == {"a", "b"}
    a = other.worker("a")
    assert (a.up, other.worker("b").up) == (True, False)
    assert other.shared_load.row(other.worker("b")) == leader.shared_load.row(leader.worker("b"))
    leader.fleet.health.probe_ok("b", 2.0)
    leader.fleet.roster.drain("a")
    leader.fleet.roster.set_served("b", ("m", "adapter"), 4096, {"adapter": ("/a", "m")})
    leader.fleet.health.set_gauges("b", Gauges(at=2.0, kv_usage=0.5, kv_capacity_tokens=1000))
    assert send_changes(leader, other)
    b = other.worker("b")
    assert (b.up, b.models, b.max_model_len, b.kv_capacity) == (True, ("m", "adapter"), 4096, 1000)
    assert other.fleet.roster.origin("adapter") == ("/a", "m")
    leader.fleet.roster.set_served("b", ("m", "adapter"), 4096, {"adapter": ("/b", "m")})
    assert send_changes(leader, other)
    assert other.fleet.roster.origin("adapter") == ("/b", "m")
    leader.fleet.health.drop_old_gauges("b", 100.0)
    assert send_changes(leader, other)
    assert b.gauges is None
    assert other.worker("a").draining
    assert [worker.name for worker in other.fleet.roster.pool("adapter").all] == ["b"]
    leader.fleet.roster.replace([spec("a", Role.LONG, 9000, 5), spec("b")])
    send_changes(leader, other)
    assert other.worker("a") is a
    assert (a.role, a.max_model_len, a.max_requests) == (Role.LONG, 9000, 5)
    leader.fleet.roster.drain("a", draining=False)
    leader.fleet.roster.remove("b")
    for _ in range(3):
        leader.fleet.health.probe_failed("a")
    send_changes(leader, other)
    assert other.names == {"a"}
    assert (other.worker("a").up, other.worker("a").draining) == (False, False)


def test_wait_for_a_worker_that_never_comes_up_is_equal(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.fleet.roster.add(spec("dead"))
    leader.now += MAX_MODEL_LIST_WAIT_S - 1
    other.now = leader.now  # a restarted process
    send_changes(leader, other)
    assert (leader.fleet.roster.all_listed(), other.fleet.roster.all_listed()) == (False, False)
    other.now = leader.now = leader.now + 1
    assert (leader.fleet.roster.all_listed(), other.fleet.roster.all_listed()) == (True, True)
    leader.fleet.roster.add(spec("late"))
    send_changes(leader, other)
    assert not other.fleet.roster.all_listed()
    leader.fleet.roster.drain("late")
    send_changes(leader, other)
    assert other.fleet.roster.all_listed()


def test_new_worker_with_an_old_name_is_a_new_worker(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    send_changes(leader, other)
    before = other.worker("a")
    before.requests = 3
    leader.fleet.roster.remove("a")
    leader.up("a")
    send_changes(leader, other)
    after = other.worker("a")
    assert after is not before
    assert other.shared_load.row(after) == leader.shared_load.row(leader.worker("a")) == 1
    assert after.requests == 3, "its running requests stay"
    for callback in other.callbacks:
        callback()
    leader.now += 1.0
    leader.shared_load.read_remote_charges(leader.now)
    assert leader.worker("a").requests == 3


def test_simultaneous_changes_are_one_version(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.fleet.roster.replace(spec(f"w{number}") for number in range(20))
    assert send_changes(leader, other)
    before = other.fleet.roster.version
    moved = [replace(spec(f"w{number}"), url="http://elsewhere") for number in range(10)]
    leader.fleet.roster.replace([*moved, *(spec(f"w{number}") for number in range(15, 30))])
    assert send_changes(leader, other)
    assert other.fleet.roster.version == before + 1
    assert [worker.spec for worker in other.fleet.roster] == [
        worker.spec for worker in leader.fleet.roster
    ]
    for worker in leader.fleet.roster:
        assert other.shared_load.row(other.worker(worker.name)) == leader.shared_load.row(worker)


def test_late_process_gets_all_workers(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    gone = leader.up("b")
    leader.worker("a").pace.learn_first_token(PrefillWork(1000), 0.5, 1.0)
    leader.replica.changes()
    leader.fleet.roster.remove(gone.name)
    other.fleet.roster.add(spec("c"))  # from an outdated fleet file
    leader.replica.send_all_next()
    send_changes(leader, other)
    assert other.names == {"a"}
    assert other.worker("a").pace.token_s == leader.worker("a").pace.token_s


def test_restarted_worker_loses_its_prefixes(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    leader.up("a")
    send_changes(leader, other)
    other.fleet.roster.prefixes.record((1, 2, 3), other.worker("a").index)
    leader.fleet.health.set_gauges("a", Gauges(at=5.0))
    send_changes(leader, other)
    assert other.fleet.roster.prefixes.matches((1, 2, 3))
    leader.worker("a").up_since = 6.0
    send_changes(leader, other)
    assert not other.fleet.roster.prefixes.matches((1, 2, 3))


def test_new_leader_continues(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    for name in "ab":
        leader.up(name)
    send_changes(leader, other)
    rows = {name: other.shared_load.row(other.worker(name)) for name in "ab"}
    other.replica.lead()
    assert not {"a", "b"} - other.names
    other.up("c")
    changes = other.replica.changes()
    assert changes is not None
    assert {known.spec.name: known.row for known in changes.known} == {**rows, "c": 2}
    leader.replica.apply(changes)  # as a new process would
    assert leader.shared_load.row(leader.worker("c")) == 2


def test_warm_links_are_replicated(pair: tuple[Process, Process]) -> None:
    leader, other = pair
    for process in pair:
        process.router.placer.links.are_made = True
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        leader.fleet.roster.add(spec(name, role))
        leader.fleet.health.probe_ok(name, 1.0)
    send_changes(leader, other)
    p, d = other.worker("p"), other.worker("d")
    assert other.router.placer.links.is_cold(p, d)
    leader.router.placer.links.set_warm(leader.worker("p"), leader.worker("d"))
    send_changes(leader, other)
    assert not other.router.placer.links.is_cold(p, d)
    with pytest.MonkeyPatch.context() as patch:  # without changes, no pair is checked
        patch.setattr(KvLinks, "is_warm", lambda *_: pytest.fail("looked"))
        assert not send_changes(leader, other)
    leader.fleet.roster.remove("d")
    send_changes(leader, other)
    assert not other.router.placer.links.is_warm(p, d)
    assert not leader.replica._sent_links


def test_more_workers_than_rows_are_logged(
    pair: tuple[Process, Process], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = pair
    monkeypatch.setattr(sharing_module.WorkerRows, "take", lambda *_: None)
    leader.up("a")
    with caplog.at_level(logging.ERROR):
        assert send_changes(leader, other)
        assert not send_changes(leader, other)
    assert caplog.text.count("are not shared") == 1
    assert other.names == {"a"}
    assert other.shared_load.row(other.worker("a")) is None

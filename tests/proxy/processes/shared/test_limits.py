"""Limits and shares of tenants across processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from proxy.core.fleet.leases import Lease, LegFailure
from proxy.core.model.types import Outcome, Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from proxy.processes.shared import limits as tenancy
from proxy.processes.shared.limits import FULL_READ_INTERVAL_S, READ_INTERVAL_S
from proxy.processes.shared.process_sheet import ProcessSheet, TenantRow
from tests.proxy.core.making import make_info, placed, refused, spec, waits
from tests.proxy.processes.tenant_load import TenantLoad
from tests.proxy.processes.virtual_group import MakeGroup, VirtualGroup


def group_of(
    make_group: MakeGroup, *tenants: TenantSpec, max_requests: int | None = None, size: int = 2
) -> VirtualGroup:
    group = make_group(size, spec("a", most=max_requests))
    group.set_tenants(*tenants)
    return group


def tenant(group: VirtualGroup, index: int, name: str = "t") -> Tenant:
    found = group.routers[index].tenants.get(name)
    assert found is not None
    return found


def remote_usage(group: VirtualGroup, index: int) -> Any:
    """Return one process's view of the tenant in other processes."""
    others = tenant(group, index).ledger.remote_usage
    assert others is not None
    return others


def submit_in_turn(
    group: VirtualGroup, index: int, name: str = "t", prompt: int = 100, output: int = 50
) -> Lease | Ticket | Refusal:
    """Submit a request of a tenant without ending the turn."""
    info = make_info(prompt, output)
    info.tenant, info.rank = tenant(group, index, name), Rank.STANDARD
    return group.routers[index].submit(info, group.now)


def submit(
    group: VirtualGroup, index: int, name: str = "t", prompt: int = 100, output: int = 50
) -> Lease | Ticket | Refusal:
    """Submit a request of a tenant, and end the turn."""
    answer = submit_in_turn(group, index, name, prompt, output)
    group.end_turn()
    group.now += READ_INTERVAL_S
    return answer


def test_concurrency_is_counted_across_processes(make_all: MakeGroup) -> None:
    group = group_of(make_all, TenantSpec("t", limits=Limits(concurrency=3)))
    leases = [placed(submit(group, index)) for index in (0, 1, 1)]
    for index in (0, 1):
        assert refused(submit(group, index)).status == 429
    group.finish(1, leases[1])
    group.now += READ_INTERVAL_S
    placed(submit(group, 0))
    assert refused(submit(group, 1)).status == 429


def test_request_that_leaves_before_it_is_placed_is_no_longer_counted(make_all: MakeGroup) -> None:
    group = group_of(make_all, TenantSpec("t", limits=Limits(concurrency=3)))
    info = make_info(100, 50)
    info.tenant = tenant(group, 1)
    assert group.routers[1].enter(info, group.now) is None
    group.end_turn()
    placed(submit(group, 1))
    placed(submit(group, 0))
    assert refused(submit(group, 0)).status == 429
    group.routers[1].leave(info, group.now)
    group.shared_loads[1].publish_rest()
    group.end_turn()
    group.now += READ_INTERVAL_S
    placed(submit(group, 0))


def test_burst_within_a_turn_is_counted_across_processes(make_processes: MakeGroup) -> None:
    group = group_of(make_processes, TenantSpec("t", limits=Limits(concurrency=3)))
    group.read_all()
    answers = [submit_in_turn(group, index) for index in (0, 1, 0, 1, 0, 1)]
    assert [type(answer) for answer in answers] == [Lease] * 3 + [Refusal] * 3
    group.routers[1].leases.finish(placed(answers[1]), group.now, Outcome.DONE)
    placed(submit_in_turn(group, 0))


@pytest.mark.plain("replaces a part")
def test_simultaneous_requests_keep_the_limit(
    make_processes: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request comes just after the first has read the count."""
    group = group_of(make_processes, TenantSpec("t", limits=Limits(concurrency=1)))
    group.read_all()
    others, second = remote_usage(group, 0), []
    look = others.running

    def read_then_submit() -> int:
        found = look()
        second.append(submit_in_turn(group, 1))
        return int(found)

    monkeypatch.setattr(others, "running", read_then_submit)
    first = submit_in_turn(group, 0)
    assert [type(answer) for answer in (*second, first)] == [Refusal, Lease]


@pytest.mark.plain("replaces a part")
@pytest.mark.parametrize("retried", [True, False])
def test_retry_keeps_its_concurrency(
    make_processes: MakeGroup, monkeypatch: pytest.MonkeyPatch, retried: bool
) -> None:
    """Another process would take the place as soon as it is free."""
    group = make_processes(2, spec("a"), spec("b"), max_attempts=2 if retried else 1)
    group.set_tenants(TenantSpec("t", limits=Limits(concurrency=1)))
    group.read_all()
    lease = placed(submit(group, 0))
    others = remote_usage(group, 0)
    publish = others.publish
    published: list[int] = []
    answers: list[Lease | Ticket | Refusal] = []

    def publish_first(running: int) -> None:
        published.append(running)
        publish(running)
        answers.append(submit_in_turn(group, 1))

    monkeypatch.setattr(others, "publish", publish_first)
    failure = LegFailure(Outcome.FAILED, lease.worker)
    again = group.routers[0].retry(lease, group.now, failure)
    types = [type(answer) for answer in answers]
    assert set(published) == ({1} if retried else {1, 0})
    assert type(again) is (Lease if retried else Refusal)
    # Without another worker, the place is released once, at the end.
    assert types == [Refusal] * (len(types) - (not retried)) + [Lease] * (not retried)
    monkeypatch.undo()
    assert tenant(group, 0).ledger.running == retried
    if retried:
        group.routers[0].leases.finish(placed(again), group.now, Outcome.DONE)
        assert remote_usage(group, 1).running() == 0


def test_refused_request_is_not_counted(make_processes: MakeGroup) -> None:
    limits = Limits(concurrency=2, requests_per_minute=1, tokens_per_minute=5000)
    group = group_of(make_processes, TenantSpec("t", limits=limits))
    placed(submit(group, 0))
    for prompt in (100, 10_000):
        assert refused(submit(group, 1, prompt=prompt)).status == 429
    others = remote_usage(group, 0)
    assert others.running() == 0


def test_finish_of_a_removed_tenant_does_not_change_its_successor(make_all: MakeGroup) -> None:
    spec = TenantSpec("t", limits=Limits(concurrency=3))
    group = group_of(make_all, spec)
    lease = placed(submit(group, 0))
    for present in ([], [spec]):
        group.set_tenants(*present)
        group.read_all(after_s=1.0)
    placed(submit(group, 0))
    placed(submit(group, 0))
    group.routers[0].leases.finish(lease, group.now, Outcome.DONE)  # of the first tenant
    placed(submit(group, 1))
    assert refused(submit(group, 1)).status == 429


def test_requests_per_minute_are_counted_across_processes(make_processes: MakeGroup) -> None:
    group = group_of(make_processes, TenantSpec("t", limits=Limits(requests_per_minute=6)))
    answers = [submit(group, n % 2) for n in range(8)]
    assert [type(answer) for answer in answers] == [Lease] * 6 + [Refusal] * 2
    group.now += 10.0
    placed(submit(group, 1))
    assert refused(submit(group, 0)).retry_after_s


def test_tokens_per_minute_are_counted_across_processes(make_processes: MakeGroup) -> None:
    group = group_of(make_processes, TenantSpec("t", limits=Limits(tokens_per_minute=1000)))
    lease = placed(submit(group, 0, prompt=600, output=300))
    assert refused(submit(group, 1, prompt=300, output=100)).status == 429
    group.finish(0, lease, Outcome.CLIENT_GONE)  # unused tokens are returned
    placed(submit(group, 1, prompt=100, output=50))


def test_shares_count_service_in_all_processes(make_processes: MakeGroup) -> None:
    """The first tenant that waits has no service, so that no tenant is lifted."""
    group = group_of(make_processes, *map(TenantSpec, ("much", "little", "none")), max_requests=3)
    leases = [placed(submit(group, 0, "much", 5000))]
    tenant(group, 0, "much").charge(10_000)
    tenant(group, 1, "little").charge(100)
    leases.append(placed(submit(group, 0, "much", 5000)))
    leases.append(placed(submit(group, 1, "little", 10)))
    for name in ("none", "much", "little"):
        waits(submit(group, 1, name))
    [first, second] = tenant(group, 1, "much"), tenant(group, 1, "little")
    standings = first.standings[Rank.STANDARD]
    assert standings == pytest.approx(tenant(group, 0, "much").standings[Rank.STANDARD]) == 10_000
    assert second.standings[Rank.STANDARD] == 100, "only waiting requests count"
    for lease in leases[:2]:
        group.finish(0, lease)
    group.now += 1.0
    dispatched = [ticket.info.tenant for ticket, _ in group.routers[1].pop_due(group.now)]
    assert dispatched == [tenant(group, 1, "none"), second]


def test_charges_of_a_dead_process_stay_and_its_concurrency_is_released(
    make_group: MakeGroup,
) -> None:
    group = group_of(make_group, TenantSpec("t", limits=Limits(concurrency=2)))
    placed(submit(group, 0))
    tenant(group, 0).charge(5000)
    placed(submit(group, 0))
    assert refused(submit(group, 1)).status == 429
    group.read_all()
    before = tenant(group, 1).virtual
    assert before == 5000
    group.restart(0)
    group.read_all(after_s=1.0)
    assert tenant(group, 1).virtual == before
    tenant(group, 0).charge(700)
    placed(submit(group, 0))
    group.read_all()
    assert tenant(group, 1).virtual == before + 700
    placed(submit(group, 1))
    assert refused(submit(group, 0)).status == 429


@pytest.mark.plain("replaces a part")
def test_clear_is_atomic_for_readers(
    make_processes: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reads after each write."""
    group = group_of(make_processes, TenantSpec("t"), TenantSpec("u"))
    placed(submit(group, 0))
    for name in "tu":
        tenant(group, 0, name).charge(1e6)
    placed(submit(group, 0, "u"))
    group.read_all()
    standings: list[float] = []

    def read_after(write: Callable[..., None]) -> Callable[..., None]:
        def step(sheet: ProcessSheet, *numbers: object) -> None:
            write(sheet, *numbers)
            group.now += READ_INTERVAL_S
            group.shared_loads[1].read_remote_charges(group.now)
            standings.extend(tenant(group, 1, name).standings[Rank.STANDARD] for name in "tu")

        return step

    with monkeypatch.context() as patch:
        for name in ("write_usage", "write_idle", "write_count"):
            patch.setattr(ProcessSheet, name, read_after(getattr(ProcessSheet, name)))
        group.crash(0)
    assert set(standings) == {1e6}
    group.read_all(after_s=READ_INTERVAL_S)
    assert tenant(group, 1).ledger.running_elsewhere == 0, "its running requests are gone"


def make_rivals(make_group: MakeGroup) -> TenantLoad:
    """Return two tenants, each with ten requests waiting in its own process, for 8 places."""
    group = group_of(make_group, TenantSpec("t"), TenantSpec("u"), max_requests=8)
    return TenantLoad(group, {(0, "t"): 10, (1, "u"): 10})


def difference(rivals: TenantLoad) -> float:
    """Run the load; return the relative difference of service."""
    rivals.run(5.0)
    return abs(rivals.served["t"] - rivals.served["u"]) / rivals.served.total()


def test_shares_are_equal_across_processes(make_all: MakeGroup) -> None:
    assert difference(make_rivals(make_all)) < 0.1


def test_restarted_process_knows_earlier_service(make_group: MakeGroup) -> None:
    rivals = make_rivals(make_group)
    group = rivals.group
    for index in (0, 1):
        for name in "tu":
            tenant(group, index, name).charge(1e6)
            rivals.add_request(index, name)
    group.read_all()
    group.restart(0)
    rivals.running = [job for job in rivals.running if job[1]]
    group.read_all(after_s=1.0)
    for name in "tu":
        standings = [tenant(group, index, name).standings[Rank.STANDARD] for index in (0, 1)]
        assert standings == pytest.approx([2e6, 2e6])
    assert difference(rivals) < 0.1


def test_returning_tenant_is_lifted_to_waiting_ones_of_other_processes(make_all: MakeGroup) -> None:
    rivals = make_rivals(make_all)
    group = rivals.group
    tenant(group, 1, "u").charge(1e6)
    for _ in range(10):
        rivals.add_request(1, "u")
    group.read_all(after_s=1.0)
    assert difference(rivals) < 0.1
    standings = [tenant(group, 0, name).standings[Rank.STANDARD] for name in "tu"]
    assert min(standings) >= 1e6


def test_new_tenant_is_lifted_to_the_last_waiting_one_of_any_process(make_all: MakeGroup) -> None:
    group = group_of(make_all, TenantSpec("t"), TenantSpec("u"), max_requests=1)
    leases = [placed(submit(group, 1, "u"))]
    tenant(group, 1, "u").charge(1e6)
    waits(submit(group, 1, "u"))
    group.routers[1].leases.finish(leases[0], group.now, Outcome.DONE)
    assert len(group.routers[1].pop_due(group.now)) == 1
    group.end_turn()
    group.read_all()
    waits(submit(group, 0, "t"))
    assert tenant(group, 0, "t").standings[Rank.STANDARD] >= 1e6
    group.read_all()
    assert tenant(group, 1, "t").standings == tenant(group, 0, "t").standings


def start_flood(make_group: MakeGroup) -> VirtualGroup:
    """Let a tenant run and wait in process 0, with 5,000 tokens settled and a million estimated."""
    group = group_of(make_group, *map(TenantSpec, ("flood", "small")), max_requests=2)
    leases = [placed(submit(group, 0, "flood")) for _ in range(2)]
    tenant(group, 0, "flood").charge(5000)
    for _ in range(2):
        waits(submit(group, 0, "flood", 1_000_000))
    group.finish(0, leases[0])
    group.now += 1.0
    [(_, answer)] = group.routers[0].pop_due(group.now)
    placed(answer)
    group.end_turn()
    group.read_all()
    return group


def test_lift_ignores_estimates_of_requests_in_other_processes(make_all: MakeGroup) -> None:
    """An estimate is returned to its own tenant; a lift is not."""
    group = start_flood(make_all)
    flood, small = tenant(group, 1, "flood"), tenant(group, 1, "small")
    assert flood.standings[Rank.STANDARD] > 1e6
    waits(submit(group, 1, "small"))
    assert small.standings[Rank.STANDARD] == flood.settled(Rank.STANDARD) == 5000


def test_estimates_of_a_dead_process_are_returned(make_group: MakeGroup) -> None:
    group = start_flood(make_group)
    group.restart(0)
    group.read_all(after_s=1.0)
    flood = tenant(group, 1, "flood")
    assert flood.standings[Rank.STANDARD] == flood.settled(Rank.STANDARD) == 5000


def test_simultaneous_lifts_of_a_tenant_count_once(make_all: MakeGroup) -> None:
    group = group_of(make_all, TenantSpec("t"))
    placed(submit(group, 0))
    for index in (0, 1):
        tenant(group, index).lift(Rank.STANDARD, 500.0)
    for shared_load in group.shared_loads:
        shared_load.flush()
    group.read_all(after_s=1.0)
    assert [tenant(group, index).standings[Rank.STANDARD] for index in (0, 1)] == [500.0, 500.0]


def test_batch_charges_do_not_change_other_ranks_in_other_processes(make_all: MakeGroup) -> None:
    group = group_of(make_all, TenantSpec("t"))
    tenant(group, 0).charge(700.0, Rank.BATCH)
    placed(submit(group, 0))
    group.read_all()
    assert tenant(group, 1).standings == [0.0, 0.0, 700.0]


def test_restored_tenant_keeps_its_charges(make_group: MakeGroup) -> None:
    """A reload removes the tenant, and another restores it; its requests end in between."""
    both = [TenantSpec("t", limits=Limits(concurrency=3)), TenantSpec("u")]
    group = group_of(make_group, *both)
    leases = [placed(submit(group, 0)) for _ in range(3)]
    tenant(group, 0).charge(1e6)
    placed(submit(group, 0, "u"))
    for specs in (both[1:], both):
        group.set_tenants(*specs)
        for index in (0, 1):
            placed(submit(group, index, "u"))
        for lease in leases:
            group.finish(0, lease)
        leases.clear()
    group.read_all(after_s=1.0)
    placed(submit(group, 1))
    tenant(group, 0).charge(10.0)
    placed(submit(group, 0))
    group.read_all(after_s=1.0)
    standings = [tenant(group, index).standings[Rank.STANDARD] for index in (0, 1)]
    assert standings == pytest.approx([1e6 + 10, 1e6 + 10])


@pytest.mark.plain("replaces a part")
def test_only_changed_tenants_are_written(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(make_group, *(TenantSpec(f"t{n}") for n in range(200)))
    group.end_turn()
    written: list[str] = []
    row_of = tenancy._row_of

    def recorded(tenant: Tenant) -> TenantRow:
        written.append(tenant.name)
        return row_of(tenant)

    monkeypatch.setattr(tenancy, "_row_of", recorded)
    tenant(group, 0, "t7").charge(70.0)
    group.finish(0, placed(submit(group, 0, "t7")))
    assert set(written) == {"t7"}
    group.read_all()
    assert tenant(group, 1, "t7").standings == [0.0, 70.0, 0.0]


@pytest.mark.plain("replaces a part")
def test_only_changed_tenants_are_read(
    make_processes: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(make_processes, *(TenantSpec(f"t{n}") for n in range(200)))
    placed(submit(group, 0, "t7"))
    group.read_all()
    rows: list[int] = []
    read = ProcessSheet.read_usage

    def recorded(sheet: ProcessSheet, row: int) -> TenantRow:
        rows.append(row)
        return read(sheet, row)

    monkeypatch.setattr(ProcessSheet, "read_usage", recorded)
    group.read_all()
    assert rows == []
    for name in ("t7", "t9", "t7"):
        placed(submit(group, 0, name))
    group.shared_loads[1].read_remote_charges(group.now)
    assert len(rows) == 2 == len(set(rows))
    assert [tenant(group, 1, name).ledger.running_elsewhere for name in ("t7", "t9")] == [3, 1]
    group.now += FULL_READ_INTERVAL_S
    group.shared_loads[1].read_remote_charges(group.now)
    assert len(rows) == 202, "a full read finds missed changes"


@pytest.mark.plain("replaces a part")
def test_more_tenants_than_rows_are_logged(
    make_all: MakeGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(make_all, TenantSpec("t"))
    for shared_load in group.shared_loads:
        for part in shared_load.parts:
            if isinstance(part, tenancy.SharedLimits):
                monkeypatch.setattr(group.tables[0], "tenant_row", lambda _: None)
    with caplog.at_level(logging.ERROR):
        placed(submit(group, 0))
    assert "each process separately" in caplog.text

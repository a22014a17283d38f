"""Tenants of several processes: one account each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Outcome, Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from proxy.processes.shared import limits as tenancy
from proxy.processes.shared.limits import FULL_READ_INTERVAL_S, READ_INTERVAL_S
from proxy.processes.shared.shared_memory import ProcessSheet, TenantRow
from tests.proxy.core.making import ask, placed, refused, spec, waits
from tests.proxy.processes.crowds import Crowds
from tests.proxy.processes.making import Crew

Crews = Callable[..., Crew]


def opened(crews: Crews, *tenants: TenantSpec, most: int | None = None, size: int = 2) -> Crew:
    """Make a crew with these tenants."""
    crew = crews(size, spec("a", most=most))
    for router in crew.routers:
        router.tenants.replace(tenants, {})
    return crew


def tenant(crew: Crew, index: int, name: str = "t") -> Tenant:
    """Find a tenant as one process knows it."""
    found = crew.routers[index].tenants.get(name)
    assert found is not None
    return found


def others_of(crew: Crew, index: int) -> Any:
    """Return what one process sees of the tenant in other processes."""
    others = tenant(crew, index).ledger.others
    assert others is not None
    return others


def come(
    crew: Crew, index: int, name: str = "t", prompt: int = 100, output: int = 50
) -> Lease | Ticket | Refusal:
    """Ask for a tenant; no turn ends."""
    asked = ask(prompt, output)
    asked.tenant, asked.rank = tenant(crew, index, name), Rank.STANDARD
    return crew.routers[index].submit(asked, crew.now)


def submit(
    crew: Crew, index: int, name: str = "t", prompt: int = 100, output: int = 50
) -> Lease | Ticket | Refusal:
    """Ask for a tenant."""
    answer = come(crew, index, name, prompt, output)
    crew.tell()
    crew.now += READ_INTERVAL_S
    return answer


def test_what_is_in_flight_counts_everywhere(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t", limits=Limits(concurrency=3)))
    leases = [placed(submit(crew, index)) for index in (0, 1, 1)]
    for index in (0, 1):
        assert refused(submit(crew, index)).status == 429
    crew.finish(1, leases[1])
    crew.now += READ_INTERVAL_S
    placed(submit(crew, 0))
    assert refused(submit(crew, 1)).status == 429


def test_a_crowd_that_comes_to_all_at_once_is_counted_as_one(crews: Crews) -> None:
    """No turn ends, and nobody looks, while it does."""
    crew = opened(crews, TenantSpec("t", limits=Limits(concurrency=3)))
    crew.look()
    answers = [come(crew, index) for index in (0, 1, 0, 1, 0, 1)]
    assert [type(answer) for answer in answers] == [Lease] * 3 + [Refusal] * 3
    crew.routers[1].leases.finish(placed(answers[1]), crew.now, Outcome.DONE)
    placed(come(crew, 0))


def test_two_at_one_moment_keep_the_limit(crews: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes to another process when the first has just seen that there is room."""
    crew = opened(crews, TenantSpec("t", limits=Limits(concurrency=1)))
    crew.look()
    others, second = others_of(crew, 0), []
    look = others.running

    def meanwhile() -> int:
        found = look()
        second.append(come(crew, 1))
        return int(found)

    monkeypatch.setattr(others, "running", meanwhile)
    first = come(crew, 0)
    assert [type(answer) for answer in (*second, first)] == [Refusal, Lease]


@pytest.mark.parametrize("well", [True, False])
def test_a_retry_keeps_its_place(crews: Crews, monkeypatch: pytest.MonkeyPatch, well: bool) -> None:
    """Whatever the first process says meanwhile, the second would have the place if it could."""
    crew = crews(2, spec("a"), spec("b"), max_attempts=2 if well else 1)
    for router in crew.routers:
        router.tenants.replace([TenantSpec("t", limits=Limits(concurrency=1))], {})
    crew.look()
    lease = placed(submit(crew, 0))
    others = others_of(crew, 0)
    publish = others.publish
    published: list[int] = []
    answers: list[Lease | Ticket | Refusal] = []

    def publish_first(running: int) -> None:
        published.append(running)
        publish(running)
        answers.append(come(crew, 1))

    monkeypatch.setattr(others, "publish", publish_first)
    again = crew.routers[0].retry(lease, crew.now, Outcome.FAILED, avoid=lease.worker, after=lease)
    types = [type(answer) for answer in answers]
    assert set(published) == ({1} if well else {1, 0})
    assert type(again) is (Lease if well else Refusal)
    # Where nobody is left to be asked, the place is let go at the end, and once.
    assert types == [Refusal] * (len(types) - (not well)) + [Lease] * (not well)
    monkeypatch.undo()
    assert tenant(crew, 0).ledger.running == well
    if well:
        crew.routers[0].leases.finish(placed(again), crew.now, Outcome.DONE)
        assert others_of(crew, 1).running() == 0


def test_who_is_kept_out_is_counted_nowhere(crews: Crews) -> None:
    limits = Limits(concurrency=2, requests_per_minute=1, tokens_per_minute=5000)
    crew = opened(crews, TenantSpec("t", limits=limits))
    placed(submit(crew, 0))
    for prompt in (100, 10_000):
        assert refused(submit(crew, 1, prompt=prompt)).status == 429
    others = others_of(crew, 0)
    assert others.running() == 0


def test_who_leaves_says_no_more_of_who_comes_after_it_by_the_same_name(crews: Crews) -> None:
    specs = [TenantSpec("t", limits=Limits(concurrency=3))]
    crew = opened(crews, *specs)
    lease = placed(submit(crew, 0))
    for present in ([], specs):
        for router in crew.routers:
            router.tenants.replace(present, {})
        crew.now += 1.0
        crew.look()
    placed(submit(crew, 0))
    placed(submit(crew, 0))
    crew.routers[0].leases.finish(lease, crew.now, Outcome.DONE)  # the first one's
    placed(submit(crew, 1))
    assert refused(submit(crew, 1)).status == 429


def test_requests_per_minute_are_counted_together(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t", limits=Limits(requests_per_minute=6)))
    answers = [submit(crew, n % 2) for n in range(8)]
    assert [type(answer) for answer in answers] == [Lease] * 6 + [Refusal] * 2
    crew.now += 10.0
    placed(submit(crew, 1))
    assert refused(submit(crew, 0)).retry_after_s


def test_tokens_are_counted_together_and_corrected(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t", limits=Limits(tokens_per_minute=1000)))
    lease = placed(submit(crew, 0, prompt=600, output=300))
    assert refused(submit(crew, 1, prompt=300, output=100)).status == 429
    crew.finish(0, lease, Outcome.CLIENT_GONE)  # what it did not write is given back
    placed(submit(crew, 1, prompt=100, output=50))


def test_a_process_that_dies_takes_what_it_had_in_flight_with_it(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t", limits=Limits(concurrency=1)))
    placed(submit(crew, 0))
    assert refused(submit(crew, 1)).status == 429
    crew.restart(0)
    crew.routers[0].tenants.replace([TenantSpec("t", limits=Limits(concurrency=1))], {})
    crew.now += 1.0
    placed(submit(crew, 1))
    assert refused(submit(crew, 0)).status == 429


def test_shares_follow_what_was_served_anywhere(crews: Crews) -> None:
    """One tenant has had much of process 0; in process 1 others go first, though they came later.

    The first to wait has had nothing, so that nobody is lifted.
    """
    crew = opened(crews, *map(TenantSpec, ("much", "little", "none")), most=3)
    leases = [placed(submit(crew, 0, "much", 5000))]
    tenant(crew, 0, "much").charge(10_000)
    tenant(crew, 1, "little").charge(100)
    leases.append(placed(submit(crew, 0, "much", 5000)))
    leases.append(placed(submit(crew, 1, "little", 10)))
    for name in ("none", "much", "little"):
        waits(submit(crew, 1, name))
    [first, second] = tenant(crew, 1, "much"), tenant(crew, 1, "little")
    stands = first.standings[Rank.STANDARD]
    assert stands == pytest.approx(tenant(crew, 0, "much").standings[Rank.STANDARD]) == 10_000
    assert second.standings[Rank.STANDARD] == 100, "what nobody waited for is no matter"
    for lease in leases[:2]:
        crew.finish(0, lease)
    crew.now += 1.0
    gone = [ticket.ask.tenant for ticket, _ in crew.routers[1].due(crew.now)]
    assert gone == [tenant(crew, 1, "none"), second]


def test_what_a_process_charged_stays_charged_when_it_dies(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t"))
    placed(submit(crew, 0))
    tenant(crew, 0).charge(5000)
    placed(submit(crew, 0))
    crew.look()
    before = tenant(crew, 1).virtual
    assert before == 5000
    crew.restart(0)
    crew.routers[0].tenants.replace([TenantSpec("t")], {})
    crew.now += 1.0
    crew.look()
    assert tenant(crew, 1).virtual == before
    tenant(crew, 0).charge(700)
    placed(submit(crew, 0))
    crew.look()
    assert tenant(crew, 1).virtual == before + 700


def test_a_clear_is_seen_whole(crews: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has been written so far: a peer looks after each step of it."""
    crew = opened(crews, TenantSpec("t"), TenantSpec("u"))
    placed(submit(crew, 0))
    for name in "tu":
        tenant(crew, 0, name).charge(1e6)
    placed(submit(crew, 0, "u"))
    crew.look()
    stands: list[float] = []

    def looking(write: Callable[..., None]) -> Callable[..., None]:
        def step(sheet: ProcessSheet, *numbers: object) -> None:
            write(sheet, *numbers)
            crew.now += READ_INTERVAL_S
            crew.sharings[1].look(crew.now)
            stands.extend(tenant(crew, 1, name).standings[Rank.STANDARD] for name in "tu")

        return step

    with monkeypatch.context() as patched:
        for name in ("write_usage", "write_idle", "write_count"):
            patched.setattr(ProcessSheet, name, looking(getattr(ProcessSheet, name)))
        crew.table.clear(0)
    assert set(stands) == {1e6}
    crew.now += READ_INTERVAL_S
    crew.look()
    assert tenant(crew, 1).ledger.elsewhere == 0, "what it had in flight is gone"


def rivals_of(crews: Crews) -> Crowds:
    """Have two tenants, each of which always has ten waiting, in a process of its own; 8 places."""
    crew = opened(crews, TenantSpec("t"), TenantSpec("u"), most=8)
    return Crowds(crew, {(0, "t"): 10, (1, "u"): 10})


def difference(rivals: Crowds) -> float:
    """Have them go on, and return how much more one had than the other; 0 for nothing."""
    rivals.play(5.0)
    return abs(rivals.got["t"] - rivals.got["u"]) / rivals.got.total()


def test_shares_hold_when_each_waits_in_a_process_of_its_own(crews: Crews) -> None:
    assert difference(rivals_of(crews)) < 0.1


def test_a_process_begun_again_knows_what_everybody_was_served(crews: Crews) -> None:
    rivals = rivals_of(crews)
    crew = rivals.crew
    for index in (0, 1):
        for name in "tu":
            tenant(crew, index, name).charge(1e6)
            rivals.comes(index, name)
    crew.look()
    crew.restart(0)
    rivals.running = [each for each in rivals.running if each[1]]
    crew.routers[0].tenants.replace([TenantSpec("t"), TenantSpec("u")], {})
    crew.now += 1.0
    crew.look()
    for name in "tu":
        stands = [tenant(crew, index, name).standings[Rank.STANDARD] for index in (0, 1)]
        assert stands == pytest.approx([2e6, 2e6])
    assert difference(rivals) < 0.1


def test_who_comes_back_is_lifted_to_those_who_wait_in_another_process(crews: Crews) -> None:
    rivals = rivals_of(crews)
    crew = rivals.crew
    tenant(crew, 1, "u").charge(1e6)
    for _ in range(10):
        rivals.comes(1, "u")
    crew.now += 1.0
    crew.look()
    assert difference(rivals) < 0.1
    stands = [tenant(crew, 0, name).standings[Rank.STANDARD] for name in "tu"]
    assert min(stands) >= 1e6


def test_who_comes_when_nobody_waits_is_lifted_to_who_waited_last_anywhere(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t"), TenantSpec("u"), most=1)
    leases = [placed(submit(crew, 1, "u"))]
    tenant(crew, 1, "u").charge(1e6)
    waits(submit(crew, 1, "u"))
    crew.routers[1].leases.finish(leases[0], crew.now, Outcome.DONE)
    assert len(crew.routers[1].due(crew.now)) == 1
    crew.tell()
    crew.look()
    waits(submit(crew, 0, "t"))
    assert tenant(crew, 0, "t").standings[Rank.STANDARD] >= 1e6
    crew.look()
    assert tenant(crew, 1, "t").standings == tenant(crew, 0, "t").standings


def flooded(crews: Crews) -> Crew:
    """Have one tenant run and wait in process 0, with 5,000 tokens settled and a million not."""
    crew = opened(crews, *map(TenantSpec, ("flood", "small")), most=2)
    leases = [placed(submit(crew, 0, "flood")) for _ in range(2)]
    tenant(crew, 0, "flood").charge(5000)
    for _ in range(2):
        waits(submit(crew, 0, "flood", 1_000_000))
    crew.finish(0, leases[0])
    crew.now += 1.0
    [(_, answer)] = crew.routers[0].due(crew.now)
    placed(answer)
    crew.tell()
    crew.look()
    return crew


def test_a_lift_counts_no_estimate_of_a_request_in_flight_in_another_process(crews: Crews) -> None:
    """The estimate is given back to its own tenant; a lift is not."""
    crew = flooded(crews)
    flood, small = tenant(crew, 1, "flood"), tenant(crew, 1, "small")
    assert flood.standings[Rank.STANDARD] > 1e6
    waits(submit(crew, 1, "small"))
    assert small.standings[Rank.STANDARD] == flood.settled(Rank.STANDARD) == 5000


def test_the_estimates_of_a_process_that_died_are_given_back(crews: Crews) -> None:
    crew = flooded(crews)
    crew.restart(0)
    crew.routers[0].tenants.replace([TenantSpec("flood"), TenantSpec("small")], {})
    crew.now += 1.0
    crew.look()
    flood = tenant(crew, 1, "flood")
    assert flood.standings[Rank.STANDARD] == flood.settled(Rank.STANDARD) == 5000


def test_two_who_lift_one_at_a_time_lift_it_once(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t"))
    placed(submit(crew, 0))
    for index in (0, 1):
        tenant(crew, index).lift(Rank.STANDARD, 500.0)
    for sharing in crew.sharings:
        sharing.flush()
    crew.now += 1.0
    crew.look()
    assert [tenant(crew, index).standings[Rank.STANDARD] for index in (0, 1)] == [500.0, 500.0]


def test_ones_batches_change_nothing_for_its_chats_elsewhere(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t"))
    tenant(crew, 0).charge(700.0, Rank.BATCH)
    placed(submit(crew, 0))
    crew.look()
    assert tenant(crew, 1).standings == [0.0, 0.0, 700.0]


def test_a_tenant_that_is_put_back_goes_on_from_its_books(crews: Crews) -> None:
    """A deploy that leaves it out, and its rollback; its requests ended in between."""
    both = [TenantSpec("t", limits=Limits(concurrency=3)), TenantSpec("u")]
    crew = opened(crews, *both)
    leases = [placed(submit(crew, 0)) for _ in range(3)]
    tenant(crew, 0).charge(1e6)
    placed(submit(crew, 0, "u"))
    for specs in (both[1:], both):
        for router in crew.routers:
            router.tenants.replace(specs, {})
        for index in (0, 1):
            placed(submit(crew, index, "u"))
        for lease in leases:
            crew.finish(0, lease)
        leases.clear()
    crew.now += 1.0
    crew.look()
    placed(submit(crew, 1))
    tenant(crew, 0).charge(10.0)
    placed(submit(crew, 0))
    crew.now += 1.0
    crew.look()
    stands = [tenant(crew, index).standings[Rank.STANDARD] for index in (0, 1)]
    assert stands == pytest.approx([1e6 + 10, 1e6 + 10])


def test_only_changed_tenants_are_told(crews: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = opened(crews, *(TenantSpec(f"t{n}") for n in range(200)))
    crew.tell()
    looked: list[str] = []
    taken = tenancy._row_of

    def counted(one: Tenant) -> TenantRow:
        looked.append(one.name)
        return taken(one)

    monkeypatch.setattr(tenancy, "_row_of", counted)
    tenant(crew, 0, "t7").charge(70.0)
    crew.finish(0, placed(submit(crew, 0, "t7")))
    assert set(looked) == {"t7"}
    crew.look()
    assert tenant(crew, 1, "t7").standings == [0.0, 70.0, 0.0]


def test_only_told_tenants_are_read(crews: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = opened(crews, *(TenantSpec(f"t{n}") for n in range(200)))
    placed(submit(crew, 0, "t7"))
    crew.look()
    rows: list[int] = []
    read = ProcessSheet.read_usage

    def counted(sheet: ProcessSheet, row: int) -> TenantRow:
        rows.append(row)
        return read(sheet, row)

    monkeypatch.setattr(ProcessSheet, "read_usage", counted)
    crew.look()
    assert rows == []
    for name in ("t7", "t9", "t7"):
        placed(submit(crew, 0, name))
    crew.sharings[1].look(crew.now)
    assert len(rows) == 2 == len(set(rows))
    assert [tenant(crew, 1, name).ledger.elsewhere for name in ("t7", "t9")] == [3, 1]
    crew.now += FULL_READ_INTERVAL_S
    crew.sharings[1].look(crew.now)
    assert len(rows) == 202, "a change that was missed is not missed for long"


def test_who_is_named_later_starts_with_nothing_held_against_it(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t"))
    placed(submit(crew, 0))
    for router in crew.routers:
        router.tenants.replace([TenantSpec("t"), TenantSpec("u", limits=Limits(concurrency=1))], {})
    placed(submit(crew, 0, "u"))
    assert refused(submit(crew, 1, "u")).status == 429
    placed(submit(crew, 1, "t"))


def test_more_tenants_than_rows_are_said(
    crews: Crews, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = opened(crews, TenantSpec("t"))
    for sharing in crew.sharings:
        for part in sharing.parts:
            if isinstance(part, tenancy.SharedLimits):
                monkeypatch.setattr(crew.table, "tenant_row", lambda _: None)
    with caplog.at_level(logging.ERROR):
        placed(submit(crew, 0))
    assert "each process separately" in caplog.text

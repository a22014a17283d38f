"""Tenants of several processes: one account each."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from proxy.core.limits import Limits
from proxy.core.tenants import Rank, Tenant, TenantSpec
from proxy.core.types import Lease, Outcome, Refusal, Ticket
from proxy.processes import tenancy
from proxy.processes.tenancy import TAKE_S
from tests.proxy.core.making import ask, placed, refused, spec, waits
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


def submit(
    crew: Crew, index: int, name: str = "t", prompt: int = 100, output: int = 50
) -> Lease | Ticket | Refusal:
    """Ask for a tenant."""
    asked = ask(prompt, output)
    asked.tenant, asked.rank = tenant(crew, index, name), Rank.STANDARD
    answer = crew.routers[index].submit(asked, crew.now)
    crew.tell()
    crew.now += TAKE_S
    return answer


def test_what_is_in_flight_counts_everywhere(crews: Crews) -> None:
    crew = opened(crews, TenantSpec("t", limits=Limits(concurrency=3)))
    leases = [placed(submit(crew, index)) for index in (0, 1, 1)]
    for index in (0, 1):
        assert refused(submit(crew, index)).status == 429
    crew.finish(1, leases[1])
    crew.now += TAKE_S
    placed(submit(crew, 0))
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
            if isinstance(part, tenancy.Tenancy):
                monkeypatch.setattr(crew.table, "tenant_row", lambda _: None)
    with caplog.at_level(logging.ERROR):
        placed(submit(crew, 0))
    assert "each process by itself" in caplog.text

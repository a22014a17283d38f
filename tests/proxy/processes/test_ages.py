"""Aged requests across processes."""

from __future__ import annotations

import pytest

from proxy.core.queue.fairness import FairnessSettings
from proxy.core.tenants.tenants import Rank, TenantSpec
from tests.proxy.core.making import spec
from tests.proxy.processes.tenant_load import TenantLoad
from tests.proxy.processes.virtual_group import MakeGroup

INTERACTIVE, STANDARD, BATCH = Rank
AGES = FairnessSettings(standard_age_s=1.0, batch_age_s=3.0)


def start_load(
    make_all: MakeGroup, waiting: dict[tuple[int, str], int], size: int = 2
) -> TenantLoad:
    """Return a load of tenants, named by rank and suffix; the first process runs 8 requests."""
    group = make_all(size, spec("a", most=8), fairness=AGES, queue_wait_s=1e6)
    names = sorted({name for _, name in waiting})
    group.set_tenants(*(TenantSpec(name, Rank[name.partition(" ")[0]]) for name in names))
    load = TenantLoad(group, waiting)
    for _ in range(8):
        load.serve(0, group.submit(0))
    return load


@pytest.mark.parametrize(
    ("low", "high", "waiting_at", "place"),
    [
        (STANDARD, INTERACTIVE, [0], 0),
        (STANDARD, INTERACTIVE, [0, 1, 2], 1),  # load in all processes
        (BATCH, STANDARD, [0], 0),
        (BATCH, STANDARD, [0], 1),
    ],
)
def test_no_rank_waits_beyond_its_age(
    make_all: MakeGroup, low: Rank, high: Rank, waiting_at: list[int], place: int
) -> None:
    waiting = {(index, high.name): 10 for index in waiting_at} | {(place, low.name): 1}
    load = start_load(make_all, waiting, size=max(2, len(waiting_at)))
    start = load.group.now
    load.run(AGES.ages[low] + 0.5)
    assert AGES.ages[low] <= load.first_served[low.name] - start < AGES.ages[low] + 0.3


@pytest.mark.parametrize("where", [0, 1])
def test_aged_requests_take_every_second_place_across_processes(
    make_all: MakeGroup, where: int
) -> None:
    load = start_load(make_all, {(0, "INTERACTIVE"): 10, (where, "STANDARD"): 60})
    load.run(4.0)  # all waiting requests have aged
    load.run(4.0)
    assert load.served["STANDARD"] / load.served.total() == pytest.approx(0.5, abs=0.1)


def test_age_does_not_change_shares_across_processes(make_all: MakeGroup) -> None:
    """All waiting requests of one tenant have aged, in the process where places come free."""
    load = start_load(make_all, {(0, "STANDARD a"): 40, (1, "STANDARD b"): 0})
    load.run(3.0)
    load.waiting[1, "STANDARD b"] = 40
    load.run(4.0)
    assert load.served["STANDARD b"] / load.served.total() == pytest.approx(0.5, abs=0.05)

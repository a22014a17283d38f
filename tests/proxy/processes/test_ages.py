"""Classes that come of age, where those they go before wait in other processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.core.queue.fairness import FairnessSettings
from proxy.core.tenants.tenants import Rank, TenantSpec
from tests.proxy.core.making import spec
from tests.proxy.processes.crowds import Crowds
from tests.proxy.processes.making import Crew

Crews = Callable[..., Crew]
INTERACTIVE, STANDARD, BATCH = Rank
AGES = FairnessSettings(standard_age_s=1.0, batch_age_s=3.0)


def opened(crews: Crews, waits: dict[tuple[int, str], int], size: int = 2) -> Crowds:
    """Make crowds of tenants named by their class and what makes one another's: `STANDARD b`.

    All 8 places are taken, and come free in the first process.
    """
    crew = crews(size, spec("a", most=8), fairness=AGES, queue_wait_s=1e6)
    names = sorted({name for _, name in waits})
    specs = [TenantSpec(name, Rank[name.partition(" ")[0]]) for name in names]
    for router in crew.routers:
        router.tenants.replace(specs, {})
    crowds = Crowds(crew, waits)
    for _ in range(8):
        crowds.goes(0, crew.submit(0))
    return crowds


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(("low", "high"), [(STANDARD, INTERACTIVE), (BATCH, STANDARD)])
def test_no_class_waits_beyond_its_age(crews: Crews, low: Rank, high: Rank, where: int) -> None:
    crowds = opened(crews, {(0, high.name): 10, (where, low.name): 1})
    begun = crowds.crew.now
    crowds.play(AGES.ages[low] + 0.5)
    assert AGES.ages[low] <= crowds.first[low.name] - begun < AGES.ages[low] + 0.3


def test_nor_where_the_flood_is_in_all_of_them(crews: Crews) -> None:
    crowds = opened(
        crews, {(index, "INTERACTIVE"): 10 for index in range(3)} | {(1, "STANDARD"): 1}, size=3
    )
    begun = crowds.crew.now
    crowds.play(1.5)
    assert 1.0 <= crowds.first["STANDARD"] - begun < 1.3


@pytest.mark.parametrize("where", [0, 1])
def test_the_aged_take_every_second_place_of_all_processes(crews: Crews, where: int) -> None:
    crowds = opened(crews, {(0, "INTERACTIVE"): 10, (where, "STANDARD"): 60})
    crowds.play(4.0)  # all that wait are of age
    crowds.play(6.0)
    assert crowds.got["STANDARD"] / crowds.got.total() == pytest.approx(0.5, abs=0.1)


def test_age_changes_no_shares_across_processes(crews: Crews) -> None:
    """All of one that wait are of age, and all places come free where they do."""
    crowds = opened(crews, {(0, "STANDARD a"): 40, (1, "STANDARD b"): 0})
    crowds.play(3.0)
    crowds.waits[1, "STANDARD b"] = 40
    crowds.play(5.0)
    assert crowds.got["STANDARD b"] / crowds.got.total() == pytest.approx(0.5, abs=0.05)

"""Classes that come of age, where those they go before wait in other processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from proxy.core.fairness import FairnessSettings
from proxy.core.tenants import Rank, TenantSpec
from proxy.core.types import Ask, Lease, Outcome
from tests.proxy.core.making import ask, placed, spec
from tests.proxy.processes.making import Crew

Crews = Callable[..., Crew]
INTERACTIVE, STANDARD, BATCH = Rank
AGES = FairnessSettings(standard_age_s=1.0, batch_age_s=3.0)


class Crowds:
    """Tenants of which each always has so many waiting, in some processes; 8 places.

    A tenant is named by its class and what makes it another's: `STANDARD`, `STANDARD b`.
    """

    def __init__(self, crews: Crews, waits: dict[tuple[int, str], int], size: int = 2) -> None:
        self.crew = crews(size, spec("a", most=8), fairness=AGES, queue_wait_s=1e6)
        self.waits = waits
        self.got: Counter[str] = Counter()
        self.first: dict[str, float] = {}  # when one of a tenant went that had to wait
        self.running: list[tuple[float, int, Lease]] = []
        self.rng = Random(1)
        names = sorted({name for _, name in waits})
        specs = [TenantSpec(name, Rank[name.partition(" ")[0]]) for name in names]
        for router in self.crew.routers:
            router.tenants.replace(specs, {})
        for _ in range(8):  # all places are taken, and come free in the first
            self._goes(0, self.crew.submit(0))

    def _turn(self) -> None:
        later, self.crew.later[:] = list(self.crew.later), []
        for each in later:
            each()

    def _goes(self, index: int, lease: Lease) -> None:
        self.running.append((self.crew.now + self.rng.uniform(0.2, 0.4), index, lease))
        if (tenant := lease.ask.tenant) is not None:
            self.got[tenant.name] += 1
            self.first.setdefault(tenant.name, self.crew.now)

    def _ask(self, index: int, name: str) -> None:
        asked: Ask = ask(100, 50)
        asked.tenant = self.crew.routers[index].tenants.get(name)
        asked.rank = Rank[name.partition(" ")[0]]
        answer = self.crew.routers[index].submit(asked, self.crew.now)
        if isinstance(answer, Lease):
            self._goes(index, answer)
        self._turn()

    def _settle(self, index: int) -> None:
        for _, answer in self.crew.routers[index].due(self.crew.now):
            self._goes(index, placed(answer))
        self._turn()

    def play(self, seconds: float) -> None:
        """Go on for so long."""
        crew, start = self.crew, self.crew.now
        self.got.clear()
        for step in range(round(seconds * 1000)):
            crew.now = start + step / 1000
            crew.sharings[step % len(crew.sharings)].look(crew.now)
            for (index, name), most in self.waits.items():
                waiting = crew.routers[index].tenants.get(name)
                assert waiting is not None
                while waiting.waiting < most:
                    self._ask(index, name)
            for each in [each for each in self.running if each[0] <= crew.now]:
                self.running.remove(each)
                crew.routers[each[1]].finish(each[2], crew.now, Outcome.DONE)
                self._turn()
                self._settle(each[1])
            if step % 5 < len(crew.routers):
                self._settle(step % 5)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(("low", "high"), [(STANDARD, INTERACTIVE), (BATCH, STANDARD)])
def test_no_class_waits_beyond_its_age_wherever_the_flood_is(
    crews: Crews, low: Rank, high: Rank, where: int
) -> None:
    crowds = Crowds(crews, {(0, high.name): 10, (where, low.name): 1})
    begun = crowds.crew.now
    crowds.play(AGES.ages[low] + 0.5)
    assert AGES.ages[low] <= crowds.first[low.name] - begun < AGES.ages[low] + 0.3


def test_nor_where_the_flood_is_in_all_of_them(crews: Crews) -> None:
    crowds = Crowds(
        crews, {(index, "INTERACTIVE"): 10 for index in range(3)} | {(1, "STANDARD"): 1}, size=3
    )
    begun = crowds.crew.now
    crowds.play(1.5)
    assert 1.0 <= crowds.first["STANDARD"] - begun < 1.3


@pytest.mark.parametrize("where", [0, 1])
def test_the_aged_take_every_second_place_of_all_processes(crews: Crews, where: int) -> None:
    crowds = Crowds(crews, {(0, "INTERACTIVE"): 10, (where, "STANDARD"): 60})
    crowds.play(4.0)  # all that wait are of age
    crowds.play(6.0)
    assert crowds.got.total() > 20 * 6
    assert crowds.got["STANDARD"] / crowds.got.total() == pytest.approx(0.5, abs=0.1)


def test_age_changes_no_shares_across_processes(crews: Crews) -> None:
    """All of one that wait are of age, and all places come free where they do."""
    crowds = Crowds(crews, {(0, "STANDARD a"): 40, (1, "STANDARD b"): 0})
    crowds.play(3.0)
    crowds.waits[1, "STANDARD b"] = 40
    crowds.play(5.0)
    assert crowds.got["STANDARD b"] / crowds.got.total() == pytest.approx(0.5, abs=0.05)

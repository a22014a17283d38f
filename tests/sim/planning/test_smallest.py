"""The fewest GPUs that serve a rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.sim.planning.test_plan import NOTHING, question
from vllm_sched.errors import UsageError
from vllm_sched.sim.planning.fleet_shapes import FleetShape
from vllm_sched.sim.planning.machine_choice import fewest_gpus
from vllm_sched.sim.planning.plan import plan
from vllm_sched.sim.planning.search import FleetSearch, ServedRate


def search_of(**given: Any) -> FleetSearch:
    return FleetSearch(question("1500x60", "ttft:500 tpot:40", effort=0.05, draws=2, **given))


@pytest.mark.parametrize("needed", [1, 2, 7, 20])
@pytest.mark.parametrize("start", [0, 3, 60])
@pytest.mark.parametrize("unit", [1, 4])
def test_smallest_size_is_found(
    needed: int, start: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = question("1500x60", "ttft:500 tpot:40", effort=0.1)
    search = FleetSearch(replace(asked, machine=replace(asked.machine, gpus=unit)))
    tried: list[int] = []

    def serving(gpus: int, _rate: float) -> ServedRate | None:
        tried.append(gpus)
        return ServedRate(FleetShape(), 1.0, NOTHING) if gpus >= needed * unit else None

    monkeypatch.setattr(search, "serving", serving)
    assert fewest_gpus(search, start, rate=8.0) == needed * unit
    assert len(set(tried)) == len(tried) < 14
    assert {gpus % unit for gpus in tried} == {0}


def test_rate_that_no_size_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of()
    monkeypatch.setattr(search, "serving", lambda *_: None)
    with pytest.raises(UsageError, match=r"--request-rate 5: .* GPUs of h100-8b do not serve it"):
        fewest_gpus(search, rate=5.0)
    with pytest.raises(UsageError, match="at most 10,000,000 are possible; give a lower rate"):
        fewest_gpus(search, rate=1e9)


def test_size_that_serves_a_rate_has_a_fleet() -> None:
    search = search_of()
    served = search.serving(1, 2.0)
    assert served is not None
    assert served.shape.workers == 1
    assert served.rate >= 2.0
    assert search.serving(1, 1000.0) is None


def test_planned_fleet_serves_the_rate_with_as_few_gpus_as_possible() -> None:
    asked = search_of().question
    one = plan(asked, 1)
    rate = 1.7 * one.best.rate
    found = plan(asked, rate=rate)
    assert found.by_gpus
    assert found.gpus == found.best.shape.workers == 2
    assert found.best.rate >= rate
    assert found.fewer is not None
    assert found.fewer.rate < rate
    sizes = [gpus for gpus, _ in found.frontier]
    assert sizes == [1, 2, 3]

"""What others are asked is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.core.model.role import Role
from proxy.processes.shared.traffic import EXCHANGE_INTERVAL_S
from tests.proxy.core.making import MODEL, ask, placed, spec
from tests.proxy.processes.making import Crew

Crews = Callable[..., Crew]


def submit(crew: Crew, index: int, *, long: bool) -> None:
    """Have one served."""
    router = crew.routers[index]
    placed(router.submit(ask(20_000 if long else 100, long=long), crew.now))
    crew.tell()


def test_the_tide_is_everybodys(crews: Crews) -> None:
    crew = crews(3, spec("s", Role.SHORT), spec("l", Role.LONG))
    for index in range(3):
        for _ in range(4 + index):
            submit(crew, index, long=False)
        submit(crew, index, long=True)
    for _ in range(2):  # those that looked first have yet to hear of the last
        crew.now += EXCHANGE_INTERVAL_S
        crew.look()
    tides = [router.placer.traffic_of(MODEL) for router in crew.routers]
    rates = [tide.shorts_per_s(crew.now) for tide in tides]
    shares = [tide.long_share(crew.now) for tide in tides]
    assert rates == pytest.approx([15 / 20] * 3, rel=0.02)
    assert shares == pytest.approx([shares[0]] * 3, rel=0.02)
    assert all(tide.longs_lately(crew.now) for tide in tides)


def test_a_process_that_begins_again_counts_from_nothing(crews: Crews) -> None:
    crew = crews(2, spec("a"))
    for _ in range(5):
        submit(crew, 0, long=False)
    crew.now += EXCHANGE_INTERVAL_S
    crew.look()
    crew.restart(0)
    for _ in range(2):
        submit(crew, 0, long=False)
    for _ in range(2):
        crew.now += EXCHANGE_INTERVAL_S
        crew.look()
    seen = crew.routers[1].placer.traffic_of(MODEL).shorts_per_s(crew.now)
    assert seen == pytest.approx(7 / 20, rel=0.1)

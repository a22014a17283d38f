"""Traffic rates across processes."""

from __future__ import annotations

import pytest

from proxy.core.model.role import Role
from proxy.processes.shared.shared_memory import LOOK_INTERVAL_S
from proxy.processes.shared.traffic import EXCHANGE_INTERVAL_S
from tests.proxy.core.making import MODEL, make_info, placed, spec
from tests.proxy.processes.virtual_group import MakeGroup, VirtualGroup


def submit(group: VirtualGroup, index: int, *, long: bool) -> None:
    router = group.routers[index]
    placed(router.submit(make_info(20_000 if long else 100, long=long), group.now))
    group.end_turn()


def test_traffic_rates_are_shared(make_all: MakeGroup) -> None:
    group = make_all(3, spec("s", Role.SHORT), spec("l", Role.LONG))
    for index in range(3):
        for _ in range(4 + index):
            submit(group, index, long=False)
        submit(group, index, long=True)
    for _ in range(2):  # the first readers see the last writers in the second round
        group.read_all(after_s=max(EXCHANGE_INTERVAL_S, LOOK_INTERVAL_S))
    traffics = [router.placer.traffic[MODEL] for router in group.routers]
    rates = [traffic.shorts_per_s(group.now) for traffic in traffics]
    shares = [traffic.workers_with_longs(group.now) for traffic in traffics]
    assert rates == pytest.approx([15 / 20] * 3, rel=0.02)
    assert shares == pytest.approx([shares[0]] * 3, rel=0.02)
    assert all(traffic.has_recent_longs(group.now) for traffic in traffics)


def test_restarted_process_counts_from_zero(make_processes: MakeGroup) -> None:
    group = make_processes(2, spec("a"))
    for _ in range(5):
        submit(group, 0, long=False)
    group.read_all(after_s=EXCHANGE_INTERVAL_S)
    group.restart(0)
    for _ in range(2):
        submit(group, 0, long=False)
    for _ in range(2):
        group.read_all(after_s=EXCHANGE_INTERVAL_S)
    seen = group.routers[1].placer.traffic[MODEL].shorts_per_s(group.now)
    assert seen == pytest.approx(7 / 20, rel=0.1)

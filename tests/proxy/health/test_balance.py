"""The balance between prefill and decode workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.learned.latency import LatencyModel
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.router import Router
from proxy.health.balance import MEMORY_S, Balance, BalanceShown, SideLoad, balance
from tests.proxy.core.making import make_info, placed, router_of, spec, waits, worker_of


@pytest.mark.parametrize(
    ("workers", "prefill", "decode", "short", "advice"),
    [
        (2, 0.95, 0.2, "prefill", "more prefill worker would help, and a decode worker could"),
        (1, 0.95, 0.2, "prefill", "more prefill worker would help; "),  # the only decode worker
        (2, 0.95, 0.7, "prefill", "more prefill worker would help; "),
        (2, 0.1, 0.9, "decode", "more decode worker would help, and a prefill worker could"),
        (2, 0.9, 0.9, "both", "both sides are short"),
        (2, 0.3, 0.3, "neither", "needs 0.86 prefill and 0.86 decode workers"),
    ],
)
def test_balance_gives_advice(
    workers: int, prefill: float, decode: float, short: str, advice: str
) -> None:
    found = balance("m", workers, workers, SideLoad(0.0, prefill, decode))
    assert found.short == short
    assert advice in found.advice


def test_balance_shows_waiting_work() -> None:
    shown = balance("m", 2, 1, SideLoad(0.0, 1.0, 0.5, MEMORY_S, 0.25, 0.05))
    assert (shown.prefill.ahead_s, shown.decode.ahead_s, shown.decode.step_s) == (30.0, 0.25, 0.05)
    assert shown.prefill.step_s is None
    assert shown.prefill.wanted == round(2 * 2 / 0.7, 2)


def router_with_sides(prefills: int = 1, **decode: Any) -> Router:
    """Return a router before prefill workers and a decode worker with these fields."""
    workers = [spec(f"p{number}", Role.PREFILL) for number in range(prefills)]
    workers.append(replace(spec("d0", Role.DECODE), **decode))
    return router_of(*workers, transfer=True, disaggregate_above=1, queue_wait_s=1e6)


def watch(router: Router, seconds: int) -> Balance:
    """Return a balance that has watched the router for some seconds."""
    found = Balance(router)
    for at in range(4 * seconds):
        found.sample(at / 4)
    return found


def shown_after(router: Router, seconds: int = 200) -> BalanceShown:
    """Return the balance of the only model after some seconds."""
    [shown] = watch(router, seconds).shown()
    return shown


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(("prompts", "busy"), [(1, 0.11), (8, 0.5), (200, 0.96)])
def test_short_prompts_make_a_worker_partly_busy(role: Role, prompts: int, busy: float) -> None:
    """A worker is busy once short prompts fill its steps."""
    router = router_with_sides()
    for worker in router.fleet.roster:
        worker.pace.fixed_s, worker.pace.token_s = 0.02, 2.5e-5
    for _ in range(prompts):
        short = make_info(100)
        short.why_whole = "" if role is Role.PREFILL else "samples"
        placed(router.submit(short, 0.0))
    shown = shown_after(router)
    side, other = shown.prefill, shown.decode
    if role is Role.DECODE:
        side, other = other, side
    assert side.busy == pytest.approx(busy, abs=0.01)
    assert other.busy == 0
    assert shown.short == ("neither" if busy < 0.8 else role.value)


def test_waiting_work_counts_in_seconds() -> None:
    """The same tokens take longer on a slow worker."""
    wanted = {}
    for token_s in (1e-4, 1e-2):
        router = router_with_sides()
        for worker in router.fleet.roster:
            worker.pace.token_s = token_s
        for _ in range(3):
            placed(router.submit(make_info(1000), 0.0))
        wanted[token_s] = shown_after(router).prefill.wanted
    assert wanted[1e-4] < 1.5 < wanted[1e-2]


@pytest.mark.parametrize(
    ("base_s", "each_s", "decoding", "kv_usage", "busy"),
    [
        (0.02, 1e-3, 20, 0.01, 0.25),  # 20 of the 80 ms by which steps may grow
        (0.02, 1e-3, 80, 0.01, 1.0),
        (0.2, 1e-2, 10, 0.01, 0.5),  # slow steps may double
        (0.02, 0.0, 100, 0.01, 0.01),
        (0.02, 0.0, 100, 0.9, 0.9),
    ],
)
def test_long_decode_steps_or_a_full_cache_make_a_worker_busy(
    base_s: float, each_s: float, decoding: int, kv_usage: float, busy: float
) -> None:
    router = router_with_sides()
    worker = worker_of(router, "d0")
    pace = worker.pace
    pace.steps, pace.base_s, pace.sequence_s, worker.num_decoding = 1.0, base_s, each_s, decoding
    router.fleet.health.set_gauges("d0", Gauges(0.0, kv_usage=kv_usage))
    shown = shown_after(router)
    assert shown.decode.busy == pytest.approx(busy, abs=0.01)
    assert shown.decode.step_s == pytest.approx(base_s + each_s * decoding, rel=0.01)


@pytest.mark.parametrize(
    ("waiting", "pages", "short", "busy", "wanted"),
    [
        pytest.param(0, 300, "neither", 0.0, 0.0, id="no queue"),
        pytest.param(8, 300, "decode", 1.0, 2.1, id="queue"),  # half of the running requests
        pytest.param(8, 3, "neither", 0.0, 0.0, id="old queue"),
    ],
)
def test_decode_worker_with_a_queue_is_busy(
    waiting: int, pages: int, short: str, busy: float, wanted: float
) -> None:
    """The cache is nearly empty here, but all seats may be taken."""
    router = router_with_sides()
    found = Balance(router)
    for at in range(300):
        if at < pages:
            router.fleet.health.set_gauges("d0", Gauges(float(at), running=16, waiting=waiting))
        found.sample(float(at))
    [shown] = found.shown()
    assert shown.short == short
    assert shown.decode.busy == pytest.approx(busy, abs=0.01)
    assert shown.decode.wanted == pytest.approx(wanted, abs=0.1)


@pytest.mark.parametrize(("slots", "busy"), [(4, 1.0), (16, 0.25), (None, 0.0)])
def test_decode_worker_is_as_busy_as_its_seats_are_taken(slots: int | None, busy: float) -> None:
    """A request without a seat waits in the router, so the worker's metrics do not show it."""
    router = router_with_sides(slots=slots)
    leases = [router.submit(make_info(1000), 0.0) for _ in range(8)]
    for lease in leases[:4]:
        router.leases.end_prefill(placed(lease), 0.0, None)
        router.leases.record_first_token(placed(lease), 0.0)
    if slots == 4:
        waits(leases[4])
    for worker in router.fleet.roster:
        worker.pace = LatencyModel()  # forget the zero durations of this test
    shown = shown_after(router)
    assert shown.decode.busy == pytest.approx(busy, abs=0.01)
    assert shown.short == ("decode" if slots == 4 else "prefill")


def test_seats_of_prompts_in_prefill_are_free() -> None:
    """Only prefill is short, for any number of prompts in prefill."""
    router = router_with_sides(slots=4, max_requests=8)
    router.fleet.health.set_gauges("d0", Gauges(0.0, 0, kv_capacity_tokens=5000))
    for _ in range(4):
        placed(router.submit(make_info(1000), 0.0))
    shown = shown_after(router)
    assert (shown.decode.busy, shown.short) == (0, "prefill")


@pytest.mark.parametrize(
    ("down", "short", "advice"),
    [
        ("p", "prefill", "no prefill worker takes requests: decode workers prefill all prompts"),
        ("d", "decode", "no decode worker takes requests: hand-overs are not possible"),
        ("pd", "both", "no prefill or decode worker takes requests"),
    ],
)
def test_side_that_is_down_is_shown(down: str, short: str, advice: str) -> None:
    router = router_with_sides(prefills=2)
    found = watch(router, 10)
    before = found.shown()[0]
    assert (before.prefill.workers, before.decode.workers) == (2, 1)
    for worker in [*router.fleet.roster]:
        if worker.name[0] in down:
            for _ in range(3):
                router.fleet.health.probe_failed(worker.name)
    found.sample(41.0)
    [shown] = found.shown()
    assert (shown.short, shown.advice) == (short, advice)
    assert shown.prefill.workers == (0 if "p" in down else 2)
    assert shown.decode.workers == (0 if "d" in down else 1)


def test_draining_worker_does_not_count() -> None:
    router = router_with_sides(prefills=2)
    router.fleet.roster.drain("p1")
    placed(router.submit(make_info(1000), 0.0))
    shown = shown_after(router)
    assert (shown.prefill.workers, shown.short) == (1, "prefill")
    assert shown.prefill.busy > 0.8


def test_time_before_the_first_look_does_not_count_as_idle() -> None:
    router = router_with_sides()
    placed(router.submit(make_info(1000), 0.0))
    assert shown_after(router, 5).prefill.busy > 0.8


def test_removed_side_is_shown_with_a_connector() -> None:
    """Discovered workers are removed when they are down."""
    for transfer in (True, False):
        router = router_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=transfer)
        router.fleet.roster.remove("p0")
        short = [side.short for side in watch(router, 1).shown()]
        assert short == (["prefill"] if transfer else [])

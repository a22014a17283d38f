"""The balance between prefill and decode workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.learned.latency import LatencyModel
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.router import Router
from proxy.health.balance import MEMORY_S, Balance, SideLoad, balance
from tests.proxy.core.making import ask, placed, router_of, spec, waits


@pytest.mark.parametrize(
    ("prefill", "decode", "short", "advice"),
    [
        (0.95, 0.2, "prefill", "one more prefill worker would help, and a decode worker could"),
        (0.95, 0.7, "prefill", "one more prefill worker would help; "),
        (0.1, 0.9, "decode", "one more decode worker would help, and a prefill worker could"),
        (0.9, 0.9, "both", "both sides are short"),
        (0.3, 0.3, "neither", "needs 0.86 prefill and 0.86 decode workers"),
    ],
)
def test_balance_gives_advice(prefill: float, decode: float, short: str, advice: str) -> None:
    found = balance("m", 2, 2, SideLoad(0.0, prefill, decode))
    assert found.short == short
    assert advice in found.advice


def test_only_worker_of_a_role_is_not_advised_to_change() -> None:
    assert "could become" not in balance("m", 1, 1, SideLoad(0.0, 0.9, 0.0)).advice


def router_with_sides() -> Router:
    """Return a router before a prefill and a decode worker."""
    return router_of(
        spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=True, disaggregate_above=1
    )


def watch(router: Router, seconds: int) -> Balance:
    """Return a balance that has watched the router for some seconds."""
    found = Balance(router)
    for at in range(4 * seconds):
        found.look(at / 4)
    return found


def test_prefill_worker_is_busy_with_a_charged_prompt() -> None:
    router = router_with_sides()
    assert watch(router, 1).shown()[0].prefill.busy == 0
    placed(router.submit(ask(10_000), 0.0))
    [shown] = watch(router, 200).shown()
    assert shown.prefill.busy > 0.97
    assert shown.decode.busy == 0
    assert shown.short == "prefill"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(("prompts", "busy"), [(1, 0.11), (8, 0.5), (200, 0.96)])
def test_short_prompts_make_a_worker_partly_busy(role: Role, prompts: int, busy: float) -> None:
    """A worker is busy once short prompts fill its steps."""
    router = router_with_sides()
    for worker in router.fleet.roster:
        worker.pace.fixed_s, worker.pace.token_s = 0.02, 2.5e-5
    for _ in range(prompts):
        short = ask(100)
        short.whole = "" if role is Role.PREFILL else "samples"
        placed(router.submit(short, 0.0))
    [shown] = watch(router, 200).shown()
    side = shown.prefill if role is Role.PREFILL else shown.decode
    assert side.busy == pytest.approx(busy, abs=0.01)
    assert shown.short == ("neither" if busy < 0.8 else role.value)


def test_decode_worker_is_as_busy_as_its_cache_is_full() -> None:
    router = router_with_sides()
    router.fleet.health.set_gauges("d0", Gauges(0.0, kv_usage=0.9))
    assert watch(router, 200).shown()[0].decode.busy == pytest.approx(0.9, abs=0.01)


def test_waiting_work_counts_in_seconds() -> None:
    """The same tokens take longer on a slow worker."""
    wanted = {}
    for token_s in (1e-4, 1e-2):
        router = router_with_sides()
        for worker in router.fleet.roster:
            worker.pace.token_s = token_s
        for _ in range(3):
            placed(router.submit(ask(1000), 0.0))
        side = Balance(router)
        side.look(0.0)
        side.look(1e6)  # a long time at the same load
        [shown] = side.shown()
        wanted[token_s] = shown.prefill.wanted
    assert wanted[1e-4] < 1.5
    assert wanted[1e-2] > 1.5


def test_balance_shows_waiting_work() -> None:
    shown = balance("m", 2, 1, SideLoad(0.0, 1.0, 0.5, MEMORY_S, 0.25, 0.05))
    assert (shown.prefill.ahead_s, shown.decode.ahead_s, shown.decode.step_s) == (30.0, 0.25, 0.05)
    assert shown.prefill.step_s is None
    assert shown.prefill.wanted == round(2 * 2 / 0.7, 2)


@pytest.mark.parametrize(
    ("base_s", "each_s", "decoding", "busy"),
    [
        (0.02, 1e-3, 20, 0.25),  # 20 of the 80 ms by which steps may grow
        (0.02, 1e-3, 80, 1.0),
        (0.2, 1e-2, 10, 0.5),  # slow steps may double
        (0.02, 0.0, 100, 0.0),
    ],
)
def test_long_decode_steps_make_a_worker_busy(
    base_s: float, each_s: float, decoding: int, busy: float
) -> None:
    """The cache is nearly empty here."""
    router = router_with_sides()
    worker = router.fleet.roster.get("d0")
    assert worker is not None
    pace = worker.pace
    pace.steps, pace.base_s, pace.each_s, worker.decoding = 1.0, base_s, each_s, decoding
    router.fleet.health.set_gauges("d0", Gauges(0.0, kv_usage=0.01))
    [shown] = watch(router, 200).shown()
    assert shown.decode.busy == pytest.approx(max(busy, 0.01), abs=0.01)
    assert shown.decode.step_s == pytest.approx(base_s + each_s * decoding, rel=0.01)


def test_decode_worker_that_prefills_is_busy() -> None:
    router = router_with_sides()
    whole = ask(10_000)
    whole.whole = "samples"
    placed(router.submit(whole, 0.0))
    assert watch(router, 200).shown()[0].decode.busy > 0.97


@pytest.mark.parametrize(("waiting", "short", "wanted"), [(0, "neither", 0), (8, "decode", 2.1)])
def test_decode_worker_with_a_queue_is_busy(waiting: int, short: str, wanted: float) -> None:
    """The cache is nearly empty here, but all seats may be taken."""
    router = router_with_sides()
    found = Balance(router)
    for at in range(300):
        router.fleet.health.set_gauges("d0", Gauges(float(at), running=16, waiting=waiting))
        found.look(float(at))
    [shown] = found.shown()
    assert shown.short == short
    assert shown.decode.busy == pytest.approx(1.0 if waiting else 0.0, abs=0.01)
    assert shown.decode.wanted == pytest.approx(wanted, abs=0.1)  # half of the running requests


@pytest.mark.parametrize("slots", [4, 16, None])
def test_decode_worker_is_as_busy_as_its_seats_are_taken(slots: int | None) -> None:
    """A request without a seat waits in the router, so the worker's metrics do not show it."""
    second = replace(spec("d0", Role.DECODE), slots=slots)
    router = router_of(
        spec("p0", Role.PREFILL), second, transfer=True, disaggregate_above=1, queue_wait_s=1e6
    )
    leases = [router.submit(ask(1000), 0.0) for _ in range(8)]
    for lease in leases[:4]:
        router.leases.prefilled(placed(lease), 0.0, None)
        router.leases.first_token(placed(lease), 0.0)
    if slots == 4:
        waits(leases[4])
    for worker in router.fleet.roster:
        worker.pace = LatencyModel()  # forget the zero durations of this test
    [shown] = watch(router, 200).shown()
    busy = {4: 1.0, 16: 0.25, None: 0.0}[slots]
    assert shown.decode.busy == pytest.approx(busy, abs=0.01)
    assert shown.short == ("decode" if slots == 4 else "prefill")


def test_seats_of_prompts_in_prefill_are_free() -> None:
    """Only prefill is short, for any number of prompts in prefill."""
    decode = replace(spec("d0", Role.DECODE), slots=4, max_requests=8)
    router = router_of(spec("p0", Role.PREFILL), decode, transfer=True, disaggregate_above=1)
    router.fleet.health.set_gauges("d0", Gauges(0.0, 0, kv_capacity_tokens=5000))
    for _ in range(4):
        placed(router.submit(ask(1000), 0.0))
    [shown] = watch(router, 200).shown()
    assert shown.decode.busy == 0
    assert shown.short == "prefill"


def test_old_queue_length_is_ignored() -> None:
    router = router_with_sides()
    for at in (1.0, 2.0):
        router.fleet.health.set_gauges("d0", Gauges(at, running=16, waiting=8))
    assert watch(router, 200).shown()[0].decode.busy < 0.1


@pytest.mark.parametrize(
    ("down", "short", "advice"),
    [
        ("p", "prefill", "no prefill worker takes requests: decode workers prefill all prompts"),
        ("d", "decode", "no decode worker takes requests: hand-overs are not possible"),
        ("pd", "both", "no prefill or decode worker takes requests"),
    ],
)
def test_side_that_is_down_is_shown(down: str, short: str, advice: str) -> None:
    router = router_of(
        spec("p0", Role.PREFILL), spec("p1", Role.PREFILL), spec("d0", Role.DECODE), transfer=True
    )
    found = watch(router, 10)
    before = found.shown()[0]
    assert (before.prefill.workers, before.decode.workers) == (2, 1)
    for worker in [*router.fleet.roster]:
        if worker.name[0] in down:
            for _ in range(3):
                router.fleet.health.probe_failed(worker.name, 40.0)
    found.look(41.0)
    [shown] = found.shown()
    assert (shown.short, shown.advice) == (short, advice)
    assert shown.prefill.workers == (0 if "p" in down else 2)
    assert shown.decode.workers == (0 if "d" in down else 1)


def test_draining_worker_does_not_count() -> None:
    router = router_of(
        spec("p0", Role.PREFILL),
        spec("p1", Role.PREFILL),
        spec("d0", Role.DECODE),
        transfer=True,
        disaggregate_above=1,
    )
    router.fleet.roster.drain("p1")
    placed(router.submit(ask(1000), 0.0))
    [shown] = watch(router, 200).shown()
    assert (shown.prefill.workers, shown.short) == (1, "prefill")
    assert shown.prefill.busy > 0.8


def test_time_before_the_first_look_does_not_count_as_idle() -> None:
    router = router_with_sides()
    placed(router.submit(ask(1000), 0.0))
    [shown] = watch(router, 5).shown()
    assert shown.prefill.busy > 0.8
    assert shown.short == "prefill"


def test_removed_side_is_shown_with_a_connector() -> None:
    """Discovered workers are removed when they are down."""
    for transfer in (True, False):
        router = router_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=transfer)
        router.fleet.roster.remove("p0")
        short = [side.short for side in watch(router, 1).shown()]
        assert short == (["prefill"] if transfer else [])


def test_fleet_without_both_sides_has_no_balance() -> None:
    assert watch(router_of(spec("g0"), spec("p0", Role.PREFILL)), 1).shown() == []

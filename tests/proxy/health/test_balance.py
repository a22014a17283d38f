"""Which side is short, from how busy both were."""

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
    ("prefill", "decode", "short", "words"),
    [
        (0.95, 0.2, "prefill", "one more prefill worker would help, and a decode worker could"),
        (0.95, 0.7, "prefill", "one more prefill worker would help; "),
        (0.1, 0.9, "decode", "one more decode worker would help, and a prefill worker could"),
        (0.9, 0.9, "both", "both sides are short"),
        (0.3, 0.3, "neither", "needs 0.86 prefill and 0.86 decode workers"),
    ],
)
def test_the_advice(prefill: float, decode: float, short: str, words: str) -> None:
    found = balance("m", 2, 2, SideLoad(0.0, prefill, decode))
    assert found.short == short
    assert words in found.advice


def test_one_worker_of_a_kind_is_not_given_away() -> None:
    assert "could become" not in balance("m", 1, 1, SideLoad(0.0, 0.9, 0.0)).advice


def sides() -> Router:
    """Make a router before a prefill and a decode worker."""
    return router_of(
        spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=True, disaggregate_above=1
    )


def watched(here: Router, seconds: int) -> Balance:
    """Look for a while."""
    found = Balance(here)
    for at in range(4 * seconds):
        found.look(at / 4)
    return found


def test_a_prefill_worker_is_busy_while_a_prompt_is_charged_to_it() -> None:
    here = sides()
    assert watched(here, 1).shown()[0].prefill.busy == 0
    placed(here.submit(ask(10_000), 0.0))
    [shown] = watched(here, 200).shown()
    assert shown.prefill.busy > 0.97
    assert shown.decode.busy == 0
    assert shown.short == "prefill"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(("prompts", "busy"), [(1, 0.11), (8, 0.5), (200, 0.96)])
def test_short_steps_have_room_for_more(role: Role, prompts: int, busy: float) -> None:
    """A worker that is never without a short prompt is busy once they fill its steps."""
    here = sides()
    for worker in here.fleet.roster:
        worker.pace.fixed_s, worker.pace.token_s = 0.02, 2.5e-5
    for _ in range(prompts):
        short = ask(100)
        short.whole = "" if role is Role.PREFILL else "samples"
        placed(here.submit(short, 0.0))
    [shown] = watched(here, 200).shown()
    side = shown.prefill if role is Role.PREFILL else shown.decode
    assert side.busy == pytest.approx(busy, abs=0.01)
    assert shown.short == ("neither" if busy < 0.8 else role.value)


def test_a_decode_worker_is_as_busy_as_its_cache_is_full() -> None:
    here = sides()
    here.fleet.health.set_gauges("d0", Gauges(0.0, kv_usage=0.9))
    assert watched(here, 200).shown()[0].decode.busy == pytest.approx(0.9, abs=0.01)


def test_work_that_waits_is_work_for_more_workers() -> None:
    """In seconds: on a slow worker the same tokens are more."""
    wanted = {}
    for token_s in (1e-4, 1e-2):
        here = sides()
        for worker in here.fleet.roster:
            worker.pace.token_s = token_s
        for _ in range(3):
            placed(here.submit(ask(1000), 0.0))
        side = Balance(here)
        side.look(0.0)
        side.look(1e6)  # long after, as if it had always been so
        [shown] = side.shown()
        wanted[token_s] = shown.prefill.wanted
    assert wanted[1e-4] < 1.5
    assert wanted[1e-2] > 1.5


def test_what_waits_is_told() -> None:
    shown = balance("m", 2, 1, SideLoad(0.0, 1.0, 0.5, MEMORY_S, 0.25, 0.05))
    assert (shown.prefill.ahead_s, shown.decode.ahead_s, shown.decode.step_s) == (30.0, 0.25, 0.05)
    assert shown.prefill.step_s is None
    assert shown.prefill.wanted == round(2 * 2 / 0.7, 2)


@pytest.mark.parametrize(
    ("base_s", "each_s", "decoding", "busy"),
    [
        (0.02, 1e-3, 20, 0.25),  # of the 80 ms that they may grow by, 20
        (0.02, 1e-3, 80, 1.0),
        (0.2, 1e-2, 10, 0.5),  # one so slow may take twice as long
        (0.02, 0.0, 100, 0.0),
    ],
)
def test_long_decode_steps_are_busy(
    base_s: float, each_s: float, decoding: int, busy: float
) -> None:
    """Though its cache is all but empty."""
    here = sides()
    worker = here.fleet.roster.get("d0")
    assert worker is not None
    pace = worker.pace
    pace.steps, pace.base_s, pace.each_s, worker.decoding = 1.0, base_s, each_s, decoding
    here.fleet.health.set_gauges("d0", Gauges(0.0, kv_usage=0.01))
    [shown] = watched(here, 200).shown()
    assert shown.decode.busy == pytest.approx(max(busy, 0.01), abs=0.01)
    assert shown.decode.step_s == pytest.approx(base_s + each_s * decoding, rel=0.01)


def test_a_decode_worker_that_prefills_is_busy() -> None:
    here = sides()
    whole = ask(10_000)
    whole.whole = "samples"
    placed(here.submit(whole, 0.0))
    assert watched(here, 200).shown()[0].decode.busy > 0.97


@pytest.mark.parametrize(("waiting", "short", "wanted"), [(0, "neither", 0), (8, "decode", 2.1)])
def test_a_decode_worker_with_a_queue_is_busy(waiting: int, short: str, wanted: float) -> None:
    """Though its cache is all but empty: it may have no more seats."""
    here = sides()
    found = Balance(here)
    for at in range(300):
        here.fleet.health.set_gauges("d0", Gauges(float(at), running=16, waiting=waiting))
        found.look(float(at))
    [shown] = found.shown()
    assert shown.short == short
    assert shown.decode.busy == pytest.approx(1.0 if waiting else 0.0, abs=0.01)
    assert shown.decode.wanted == pytest.approx(wanted, abs=0.1)  # half as many as run


@pytest.mark.parametrize("slots", [4, 16, None])
def test_a_decode_worker_is_as_busy_as_its_seats_are_taken(slots: int | None) -> None:
    """Whoever finds none waits in the router: not a page shows it."""
    second = replace(spec("d0", Role.DECODE), slots=slots)
    here = router_of(
        spec("p0", Role.PREFILL), second, transfer=True, disaggregate_above=1, queue_wait_s=1e6
    )
    leases = [here.submit(ask(1000), 0.0) for _ in range(8)]
    for lease in leases[:4]:
        here.leases.prefilled(placed(lease), 0.0, None)
        here.leases.first_token(placed(lease), 0.0)
    if slots == 4:
        waits(leases[4])
    for worker in here.fleet.roster:
        worker.pace = LatencyModel()  # what took no time here taught that it takes none
    [shown] = watched(here, 200).shown()
    busy = {4: 1.0, 16: 0.25, None: 0.0}[slots]
    assert shown.decode.busy == pytest.approx(busy, abs=0.01)
    assert shown.short == ("decode" if slots == 4 else "prefill")


def test_seats_that_prompts_will_want_once_they_are_prefilled_are_free_till_then() -> None:
    """Prefill alone is short, however many of them the prefill worker has."""
    decode = replace(spec("d0", Role.DECODE), slots=4, max_requests=8)
    here = router_of(spec("p0", Role.PREFILL), decode, transfer=True, disaggregate_above=1)
    here.fleet.health.set_gauges("d0", Gauges(0.0, 0, kv_capacity_tokens=5000))
    for _ in range(4):
        placed(here.submit(ask(1000), 0.0))
    [shown] = watched(here, 200).shown()
    assert shown.decode.busy == 0
    assert shown.short == "prefill"


def test_a_queue_of_long_ago_is_none() -> None:
    here = sides()
    for at in (1.0, 2.0):
        here.fleet.health.set_gauges("d0", Gauges(at, running=16, waiting=8))
    assert watched(here, 200).shown()[0].decode.busy < 0.1


@pytest.mark.parametrize(
    ("down", "short", "words"),
    [
        (
            "p",
            "prefill",
            "no prefill worker takes requests: decode workers prefill all prompts",
        ),
        ("d", "decode", "no decode worker takes requests: hand-overs are not possible"),
        ("pd", "both", "no prefill or decode worker takes requests"),
    ],
)
def test_a_side_that_is_down_is_shown(down: str, short: str, words: str) -> None:
    """That is when somebody is woken to look."""
    here = router_of(
        spec("p0", Role.PREFILL), spec("p1", Role.PREFILL), spec("d0", Role.DECODE), transfer=True
    )
    found = watched(here, 10)
    before = found.shown()[0]
    assert (before.prefill.workers, before.decode.workers) == (2, 1)
    for worker in [*here.fleet.roster]:
        if worker.name[0] in down:
            for _ in range(3):
                here.fleet.health.probe_failed(worker.name, 40.0)
    found.look(41.0)
    [shown] = found.shown()
    assert (shown.short, shown.advice) == (short, words)
    assert shown.prefill.workers == (0 if "p" in down else 2)
    assert shown.decode.workers == (0 if "d" in down else 1)


def test_who_drains_has_no_part_in_it() -> None:
    """The one that is left has all the work, however idle the other is."""
    here = router_of(
        spec("p0", Role.PREFILL),
        spec("p1", Role.PREFILL),
        spec("d0", Role.DECODE),
        transfer=True,
        disaggregate_above=1,
    )
    here.fleet.roster.drain("p1")
    placed(here.submit(ask(1000), 0.0))
    [shown] = watched(here, 200).shown()
    assert (shown.prefill.workers, shown.short) == (1, "prefill")
    assert shown.prefill.busy > 0.8


def test_what_was_before_the_first_look_was_not_idle() -> None:
    """Who starts a router anew in trouble, and asks, hears of the trouble."""
    here = sides()
    placed(here.submit(ask(1000), 0.0))
    [shown] = watched(here, 5).shown()
    assert shown.prefill.busy > 0.8
    assert shown.short == "prefill"


def test_a_side_that_has_left_is_shown_where_a_connector_is_named() -> None:
    """Workers that are discovered are gone when they are down."""
    for transfer in (True, False):
        here = router_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=transfer)
        here.fleet.roster.remove("p0")
        told = [each.short for each in watched(here, 1).shown()]
        assert told == (["prefill"] if transfer else [])


def test_fleets_without_both_sides_have_no_balance() -> None:
    assert watched(router_of(spec("g0"), spec("p0", Role.PREFILL)), 1).shown() == []

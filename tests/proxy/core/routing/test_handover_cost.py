"""Whole or in two legs, and on which workers."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Attempts, Decision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.model.types import Outcome, Reason, RequestInfo, Usage
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.router import Router
from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.core.tenants.tenants import Rank
from tests.present import present
from tests.proxy.core.making import (
    GENERAL,
    MODEL,
    ask,
    idle,
    placed,
    refused,
    router_of,
    spec,
    those,
    waits,
    worker_of,
)

P, D = Role.PREFILL, Role.DECODE
RULES = ["adaptive", "length", "least_loaded", "round_robin"]
LONG = 12_000


def router(*more: WorkerSpec, prefills: int = 1, decodes: int = 1, **settings: Any) -> Router:
    """Make one with prefill and decode workers."""
    specs = [spec(f"p{n}", P) for n in range(prefills)] + [spec(f"d{n}", D) for n in range(decodes)]
    return router_of(*specs, *more, transfer=True, **settings)


def busy(here: Router, name: str = "d0", count: int = 4) -> list[Lease]:
    """Have short requests decode on a worker."""
    leases = []
    for _ in range(count):
        one = ask(10, 1000)
        one.whole = "samples"
        lease = placed(here.submit(one, 0.0, Attempts(others(here, name))))
        here.leases.first_token(lease, 0.0)
        leases.append(lease)
    return leases


def others(here: Router, name: str) -> frozenset[Worker]:
    return frozenset(w for w in here.fleet.roster if w.name != name)


def known(here: Router, prefix: tuple[int, ...], worker: Worker) -> int:
    """Count the first blocks of a prompt that a worker is taken to hold."""
    found = here.fleet.roster.prefixes.matches(prefix)
    return max((blocks for blocks, holders in found if holders >> worker.index & 1), default=0)


def why(here: Router) -> dict[str, int]:
    """Return what was counted."""
    return {key[1]: count for key, count in here.placer.handovers.items()}


# Auto


def test_a_long_prompt_is_handed_over_where_others_decode() -> None:
    here = router(prefills=2)
    lease = present(placed(here.submit(ask(LONG), 0.0)) if busy(here, count=1) else None)
    assert lease.worker.name == "d0"
    assert lease.decision.reason is Reason.HANDOVER
    assert lease.prefill is not None
    assert lease.prefill.worker.role is P
    assert lease.decision.route == f"{lease.prefill.worker.name}>d0"
    assert lease.decision.whether == HandoverVerdict.HANDED_OVER


def test_a_short_prompt_is_not() -> None:
    here = router()
    busy(here, count=1)
    lease = placed(here.submit(ask(20), 0.0))
    assert (lease.worker.name, lease.prefill) == ("d0", None)
    assert lease.decision.reason is Reason.DECODE_POOL
    assert why(here)["not_worth_it"] == 1


def test_nobody_decodes_there_so_a_transfer_would_be_for_nothing() -> None:
    """Own time alone: the same prefill here or there, and there the transfer comes on top."""
    here = router()
    lease = placed(here.submit(ask(LONG), 0.0))
    assert lease.prefill is None
    assert lease.decision.whether == HandoverVerdict.NOT_WORTH_IT


def test_those_who_will_come_meanwhile_count_too() -> None:
    """Nobody decodes there now, but ten shorts a second come, and would wait for its prefill."""
    here = router()
    for at in range(100):
        here.leases.finish(placed(here.submit(ask(20), at / 10)), at / 10, Outcome.DONE)
    assert placed(here.submit(ask(LONG), 10.0)).prefill is not None
    assert placed(here.submit(ask(200), 10.0)).prefill is None


def test_of_longs_at_once_none_is_computed_where_four_decode() -> None:
    """They would get next to no token for all of that time, not for a part of it."""
    here = router()
    busy(here, count=4)
    routes = [placed(here.submit(ask(LONG), 0.0)).decision.route for _ in range(3)]
    assert routes == ["p0>d0"] * 3


def test_of_long_prompts_the_prefill_worker_has_the_word() -> None:
    """A decode worker has short ones alone, and their tokens are cheap."""
    here = router()
    busy(here, count=1)
    first, second = worker_of(here, "p0").pace, worker_of(here, "d0").pace
    first.token_s, second.token_s = 2e-4, 2e-5
    worker_of(here, "d0").reprice()
    assert placed(here.submit(ask(LONG), 0.0)).prefill is None  # nothing is known of its length
    first.saw_length(LONG)
    assert placed(here.submit(ask(LONG), 0.0)).prefill is not None
    assert placed(here.submit(ask(100), 0.0)).prefill is None


def test_how_long_its_prompts_are_is_learnt_of_prefill_workers() -> None:
    here = router(disaggregate_above=1)
    for size in (LONG, LONG, 2000):
        lease = placed(here.submit(ask(size), 0.0))
        here.leases.prefilled(lease, 1.0, None)
        here.leases.finish(lease, 2.0, Outcome.DONE)
    assert worker_of(here, "p0").pace.length == pytest.approx(11_000)
    assert worker_of(here, "d0").pace.length == 0.0


def test_a_prefill_on_the_decode_worker_has_until_then_to_be_done() -> None:
    here = router()
    busy(here, count=4)
    worker = worker_of(here, "d0")
    placed(here.submit(ask(5000), 0.0, Attempts(those(here, "p0"))))
    assert worker.wait_s(0.0, for_long=False) > 0.1
    told = here.placer.explain(ask(LONG), 0.0)
    assert isinstance(told, Decision)
    [cost] = [score.total for score in told.scores if score.worker == "d0"]
    assert told.handover is not None
    output_s = worker.output_price * 50
    step_s = worker.pace.step_s(worker.decoding)
    own_s = told.handover.prefill_s + told.handover.transfer_s
    assert cost == pytest.approx(own_s + step_s + output_s)


def test_one_that_takes_longer_is_waited_for_and_foreseen() -> None:
    here = router(disaggregate_above=1)
    worker, long = worker_of(here, "d0"), ask(6 * LONG)
    long.whole = "samples"
    placed(here.submit(long, 0.0))
    wait_s = worker.wait_s(0.0, for_long=False)
    lease = placed(here.submit(ask(LONG), 0.0))
    halves = present(lease.decision.handover)
    assert wait_s > 2 * halves.prefill_s
    foreseen_s = wait_s + halves.transfer_s + worker.pace.step_s(0)
    assert lease.decision.predicted_ttft_s == pytest.approx(foreseen_s)


def test_who_would_wait_for_it_too_long_is_refused_early() -> None:
    early = AdmissionSettings({Rank.STANDARD: 2.0})
    for ahead in (0, 6 * LONG):  # what the decode worker prefills: 7.2 s
        here = router(disaggregate_above=1, admission=early)
        for each in here.fleet.roster:
            each.pace.prefills, each.pace.token_s, each.pace.fixed_s = 100, 1e-4, 0.0
            each.reprice()
        if ahead:
            long = ask(ahead)
            long.whole = "samples"
            assert placed(here.submit(long, 0.0)).worker.name == "d0"
            assert refused(here.submit(ask(LONG), 0.0)).reason is Reason.TOO_SLOW
        else:
            assert placed(here.submit(ask(LONG), 0.0)).prefill is not None


def test_an_idle_general_worker_is_as_good_as_two_others() -> None:
    here = router(spec("g0", GENERAL))
    busy(here, count=2)
    lease = placed(here.submit(ask(LONG), 0.0))
    assert (lease.worker.name, lease.prefill) == ("g0", None)
    assert why(here)["elsewhere"] == 1


# A threshold


@pytest.mark.parametrize("rule", RULES)
def test_a_threshold_counts_tokens(rule: str) -> None:
    here = router(policy=rule, disaggregate_above=500)
    assert placed(here.submit(ask(501), 0.0)).prefill is not None
    assert placed(here.submit(ask(500), 0.0)).prefill is None


@pytest.mark.parametrize("above", [None, 2000])
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_on_its_way_to_a_decode_worker_is_not_held_there_yet(
    above: int | None, stream: bool
) -> None:
    """Of many questions to one document that come at once it would compute all but the first."""
    here = router(disaggregate_above=above)
    busy(here)
    prefix = tuple(range(1, 48))

    def submit(now: float) -> Lease:
        return placed(here.submit(ask(LONG, prefix=prefix, stream=stream), now))

    leases = [submit(0.0) for _ in range(4)]
    assert all(lease.prefill is not None for lease in leases)
    d0 = leases[0].worker
    assert known(here, prefix, d0) == 0
    first = present(leases[0].prefill)
    assert known(here, prefix, first.worker) == len(prefix)
    here.leases.prefilled(leases[0], 2.0, None)
    assert here.leases.reconsider(leases[0], 2.0, may_move=True)
    assert (submit(2.0).prefill is None) != stream  # which shows when it has come
    if stream:
        here.leases.first_token(leases[0], 2.1)
    assert known(here, prefix, d0) == len(prefix)
    assert submit(2.2).prefill is None


# Which two


def test_the_prefill_worker_that_is_done_first() -> None:
    here = router(prefills=3, disaggregate_above=1)
    first = [placed(here.submit(ask(1000), 0.0)).prefill for _ in range(3)]
    assert {lease.worker.name for lease in first if lease} == {"p0", "p1", "p2"}


def test_a_prefill_worker_that_holds_the_prefix() -> None:
    here = router(prefills=3, decodes=2, disaggregate_above=1)
    prefix = tuple(range(8))
    lease = placed(here.submit(ask(1000, prefix=prefix), 0.0))
    where = present(lease.prefill).worker
    here.leases.prefilled(lease, 1.0, Usage(1000))
    again = placed(here.submit(ask(1000, prefix=prefix), 2.0, Attempts(frozenset([lease.worker]))))
    assert present(again.prefill).worker is where


def test_one_that_is_larger_than_the_cache_does_not_wait_for_ever() -> None:
    here = router(disaggregate_above=100)
    here.fleet.health.set_gauges("d0", Gauges(0.0, kv_capacity_tokens=3000))
    assert placed(here.submit(ask(4000, 100), 0.0)).prefill is not None


def test_a_prompt_that_no_prefill_worker_holds() -> None:
    specs = spec("p0", P, limit=1000), spec("d0", D)
    here = router_of(*specs, transfer=True, disaggregate_above=1)
    assert placed(here.submit(ask(1000), 0.0)).prefill is None
    assert placed(here.submit(ask(900), 0.0)).prefill is not None
    assert why(here) == {HandoverVerdict.PREFILL_BUSY: 1, HandoverVerdict.HANDED_OVER: 1}


def test_a_link_that_fails_is_counted_where_it_was_wanted() -> None:
    specs = spec("p0", P), spec("d0", D), spec("d1", D)
    here = router_of(*specs, transfer=True, disaggregate_above=LONG - 1)
    for _ in range(3):
        here.placer.links.failed(worker_of(here, "p0"), worker_of(here, "d0"), 1.0)
    for size in (10, LONG):
        lease = placed(here.submit(ask(size), 1.0, Attempts(those(here, "d1"))))
        assert (lease.prefill, lease.worker.name) == (None, "d0")
    assert why(here) == {HandoverVerdict.NOT_WORTH_IT: 1, HandoverVerdict.PREFILL_BUSY: 1}


# What can't be handed over, and when nobody can


def test_what_can_not_be_split_is_served_whole() -> None:
    here = router(disaggregate_above=1)
    one = ask(LONG)
    one.whole = "beam_search"
    assert placed(here.submit(one, 0.0)).prefill is None
    assert why(here) == {"beam_search": 1}


def test_without_a_live_decode_worker_it_is_refused() -> None:
    here = router(disaggregate_above=1)
    for _ in range(3):
        here.fleet.health.probe_failed("d0", 0.0)
    assert refused(here.submit(ask(LONG), 0.0)).status == 503


def test_a_fleet_without_a_connector_never_hands_over() -> None:
    here = router_of(spec("p0", P), spec("d0", D), disaggregate_above=1)
    assert placed(here.submit(ask(LONG), 0.0)).prefill is None
    assert here.placer.handovers == {}


# Failures


def test_a_prefill_worker_that_fails_is_replaced_then_done_without() -> None:
    here = router(prefills=3, disaggregate_above=1)
    one, tried = ask(LONG), frozenset[Worker]()
    names = []
    for attempt in range(3):
        lease = placed(here.submit(one, 0.0, Attempts(tried)))
        leg = lease.under_way
        names.append(leg.worker.name)
        if attempt < 2:
            here.leases.finish(lease, 0.0, Outcome.FAILED)
            tried |= {leg.worker}
    assert len(set(names)) == 3
    assert names[2] == "d0"
    failures = [not w.breaker.has_no_failures for w in here.fleet.roster if w.role is P]
    assert sorted(failures) == [False, True, True]
    assert worker_of(here, "d0").breaker.has_no_failures


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED, Outcome.CLIENT_GONE])
@pytest.mark.parametrize("before", [0, 2])
def test_what_a_prefill_that_fails_was_for_is_not_cached_where_it_never_came(
    outcome: Outcome, before: int
) -> None:
    """Else the next try would find it there, and have the decode worker compute all of it."""
    here = router(prefills=2, disaggregate_above=256)
    blocks = tuple(range(1, 97))
    d0 = worker_of(here, "d0")
    here.fleet.roster.prefixes.record(blocks[:before], d0.index)
    one = ask(LONG, prefix=blocks)
    lease = placed(here.submit(one, 0.0))
    tokens = present(lease.decision.handover).tokens
    first = lease.under_way.worker
    here.leases.finish(lease, 1.0, outcome)
    assert known(here, blocks, d0) == before
    again = placed(here.submit(one, 1.0, Attempts(frozenset([first]))))
    assert again.decision.handover is not None
    assert again.decision.handover.prefill is not first
    assert again.decision.handover.tokens == tokens
    here.leases.prefilled(again, 2.0, None)
    assert known(here, blocks, d0) == before
    here.leases.first_token(again, 2.5)
    here.leases.finish(again, 3.0, Outcome.FAILED)  # by then it had come
    assert known(here, blocks, d0) == len(blocks)


# Charges


def charges(here: Router, name: str) -> tuple[int, ...]:
    w = worker_of(here, name)
    return w.requests, w.sequences, w.prefill_tokens, w.decode_tokens, w.kv_tokens, w.decoding


@pytest.mark.parametrize("stream", [True, False])
def test_both_workers_are_charged_at_once_and_freed_in_turn(stream: bool) -> None:
    here = router(disaggregate_above=1)
    lease = placed(here.submit(ask(1000, 50, stream=stream), 0.0))
    assert charges(here, "p0") == (1, 1, 1000, 0, 1000, 0)
    assert charges(here, "d0") == (1, 0, 0, 50, 1050, 0)
    here.leases.first_token(lease, 0.1)  # of whom? nothing was sent there yet
    assert charges(here, "d0") == (1, 0, 0, 50, 1050, 0)
    here.leases.prefilled(lease, 0.5, Usage(1000))
    here.leases.prefilled(lease, 0.5, Usage(1000))
    assert charges(here, "p0") == (0, 0, 0, 0, 0, 0)
    assert charges(here, "d0") == (1, 1, 0, 50, 1050, 0)
    if stream:
        here.leases.first_token(lease, 0.6)
        here.leases.first_token(lease, 0.7)
    else:
        here.fleet.settle(5.0)
    assert charges(here, "d0") == (1, 1, 0, 50, 1050, 1)
    here.leases.tokens(lease, 20)
    assert charges(here, "d0") == (1, 1, 0, 30, 1050, 1)
    here.leases.finish(lease, 9.0, Outcome.DONE, Usage(1000, 50))
    assert idle(here.fleet.roster)


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("phase", range(3))
def test_every_way_out_frees_both(outcome: Outcome, phase: int) -> None:
    here = router(disaggregate_above=1)
    lease = placed(here.submit(ask(1000, 50), 0.0))
    if phase > 0:
        here.leases.prefilled(lease, 0.5, None)
    if phase > 1:
        here.leases.first_token(lease, 0.6)
    here.leases.finish(lease, 0.7, outcome)
    here.leases.finish(lease, 0.8, outcome)
    here.leases.prefilled(lease, 0.9, None)
    assert idle(here.fleet.roster)


# Learning


def test_a_prefill_leg_teaches_the_prefill_worker_and_a_transfer_the_transfer() -> None:
    here = router(disaggregate_above=1)
    for at in range(40):
        now = at * 10.0
        lease = placed(here.submit(ask(2000, 50), now))
        here.leases.prefilled(lease, now + 0.8, Usage(2000))
        step_s = lease.worker.pace.step_s(0)
        here.leases.first_token(lease, now + 0.8 + 0.3 + step_s)
        here.leases.finish(lease, now + 3.0, Outcome.DONE, Usage(2000, 50))
    prefill, decode = worker_of(here, "p0"), worker_of(here, "d0")
    assert prefill.pace.first_token_s(2000) == pytest.approx(0.8, rel=0.1)
    assert here.placer.transfer_times(MODEL).all.seconds(2000) == pytest.approx(0.3, rel=0.1)
    assert decode.pace.prefills == 0  # it prefilled nothing
    lease = placed(here.submit(ask(2000, 50), 999.0))
    assert present(lease.decision.handover).transfer_s == pytest.approx(0.3, rel=0.1)
    assert lease.decision.predicted_ttft_s == pytest.approx(1.1, rel=0.15)


def test_without_a_stream_the_end_teaches_how_long_the_decode_workers_steps_take() -> None:
    here, now = router(disaggregate_above=1), 0.0
    pace = worker_of(here, "d0").pace
    for _ in range(80):
        lease = placed(here.submit(ask(LONG, 100, stream=False), now))
        now += 1.0
        here.leases.prefilled(lease, now, None)
        now += present(lease.decision.handover).transfer_s + 100 * 0.03
        if here.leases.may_learn(lease, now):
            here.leases.finish(lease, now, Outcome.DONE, Usage(LONG, 100))
        else:
            here.leases.finish(lease, now, Outcome.DONE)
        now += 10.0
    assert pace.step_s(0.5) == pytest.approx(0.03, rel=0.15)
    assert pace.end_due > now - 10.0  # not from each of them


def test_cached_tokens_of_a_hand_over_are_the_prefill_workers() -> None:
    here = router(disaggregate_above=1)
    prefix = tuple(range(8))
    lease = placed(here.submit(ask(1000, prefix=prefix), 0.0))
    here.leases.prefilled(lease, 0.5, Usage(1000, 1, 0))
    here.leases.finish(lease, 1.0, Outcome.DONE, Usage(1000, 50, 900))
    assert not worker_of(here, "d0").reports_cache
    before = worker_of(here, "p0").pace.missing
    for _ in range(20):
        one = ask(9000, prefix=prefix)
        lease = placed(here.submit(one, 2.0))
        here.leases.prefilled(lease, 2.5, Usage(9000, 1, 1))
        here.leases.finish(lease, 3.0, Outcome.DONE)
    assert worker_of(here, "p0").pace.missing > before


# Telling


def explained(here: Router, one: RequestInfo) -> tuple[str, dict[str, str]]:
    told = here.placer.explain(one, 0.0)
    by = {score.worker: score.prefill_by or score.note for score in told.scores}
    return getattr(told, "route", ""), by


@pytest.mark.parametrize("rule", RULES)
def test_an_explanation_names_both_and_charges_nobody(rule: str) -> None:
    here = router(disaggregate_above=100, policy=rule)
    route, by = explained(here, ask(1000))
    assert route == "p0>d0"
    assert (
        getattr(here.placer.explain(ask(1000), 0.0), "whether", None) == HandoverVerdict.HANDED_OVER
    )
    assert (
        getattr(here.placer.explain(ask(50), 0.0), "whether", None) == HandoverVerdict.NOT_WORTH_IT
    )
    assert by["p0"] == "prefills only"
    if rule == "adaptive":
        assert by["d0"] == "p0"
    assert idle(here.fleet.roster)


def test_fleets_of_one_kind_count_nothing() -> None:
    fleet = Fleet()
    fleet.roster.add(spec("g0"))
    fleet.health.probe_ok("g0", 0.0)
    here = router_of(spec("g0"), transfer=True)
    assert placed(here.submit(ask(LONG), 0.0)).decision.whether == ""
    assert here.placer.handovers == {}
    assert getattr(here.placer.explain(ask(LONG), 0.0), "whether", None) == ""


# In time


def test_nothing_is_handed_to_a_worker_that_would_fetch_it_too_late() -> None:
    """Its own prefills come first, and the blocks would be another prompt's by then."""
    here = router(disaggregate_above=1, transfer_within_s=24.0)
    assert placed(here.submit(ask(LONG), 0.0)).prefill is not None
    decode = worker_of(here, "d0")
    decode.pace.token_s = 1e-3
    whole = ask(30_000)
    whole.whole = "samples"
    placed(here.submit(whole, 0.0))
    alone = placed(here.submit(ask(LONG), 0.0))
    assert alone.prefill is None
    here.leases.finish(alone, 0.0, Outcome.MOOT)
    assert placed(here.submit(ask(LONG), 10.0)).prefill is not None  # a third is done by then


@pytest.mark.parametrize("above", [None, 1])
def test_a_transfer_that_takes_longer_than_blocks_are_kept_is_none(above: int | None) -> None:
    here = router(disaggregate_above=above, transfer_within_s=24.0)
    busy(here, count=1)
    for _ in range(50):
        here.placer.transfer_times(MODEL).all.saw(LONG, 30.0)
    assert placed(here.submit(ask(LONG), 0.0)).prefill is None
    assert placed(here.submit(ask(LONG // 2), 0.0)).prefill is not None or above is None


def test_what_has_been_kept_for_a_while_has_less_time_left_to_be_fetched() -> None:
    here = router(decodes=2, disaggregate_above=1, transfer_within_s=24.0)
    lease = placed(here.submit(ask(LONG), 0.0))
    busy_one, halves = lease.worker, lease.decision.handover
    present(halves).transfer_s = 5.0
    here.leases.prefilled(lease, 1.0, None)
    assert here.leases.reconsider(lease, 1.0, may_move=False, spent_s=18.0)
    assert not here.leases.reconsider(lease, 1.0, may_move=True, spent_s=20.0)
    busy_one.pace.token_s = 1e-3
    whole = ask(10_000)
    whole.whole = "samples"
    placed(here.submit(whole, 1.0, Attempts(others(here, busy_one.name))))
    assert here.leases.reconsider(lease, 1.0, may_move=False, spent_s=8.0)
    assert not here.leases.reconsider(lease, 1.0, may_move=False, spent_s=10.0)
    assert here.leases.reconsider(lease, 1.0, may_move=True, spent_s=10.0)
    assert lease.worker is not busy_one


@pytest.mark.parametrize(("spent_s", "is_asked"), [(8.0, True), (24.5, False)])
def test_one_that_seems_down_is_asked_where_nobody_else_is_but_not_too_late(
    spent_s: float, is_asked: bool
) -> None:
    here = router(disaggregate_above=1, transfer_within_s=24.0)
    lease = placed(here.submit(ask(LONG), 0.0))
    here.leases.prefilled(lease, 1.0, None)
    lease.worker.up = False
    assert here.leases.reconsider(lease, 1.0, may_move=True, spent_s=spent_s) is is_asked


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_the_rest_is_known_to_have_the_prompt_and_nobody_else(stream: bool) -> None:
    here = router(decodes=2, disaggregate_above=1)
    prefix, had = tuple(range(1, 9)), {"d0": 2, "d1": 3}
    for name, blocks in had.items():
        here.fleet.roster.prefixes.record(prefix[:blocks], worker_of(here, name).index)
    lease = placed(here.submit(ask(LONG, prefix=prefix, stream=stream), 0.0))
    here.leases.prefilled(lease, 1.0, None)
    first = lease.worker
    first.up = False
    assert here.leases.reconsider(lease, 1.0, may_move=True)
    second = lease.worker
    assert second is not first
    here.leases.first_token(lease, 1.1)
    assert (known(here, prefix, first), known(here, prefix, second)) == (had[first.name], 8)


def test_whoever_is_not_asked_for_the_rest_has_nothing_of_the_prompt() -> None:
    here = router(decodes=2, disaggregate_above=1)
    prefix = tuple(range(1, 9))
    lease = placed(here.submit(ask(LONG, prefix=prefix, stream=False), 0.0))
    here.leases.prefilled(lease, 1.0, None)
    lease.worker.up = False
    assert not here.leases.reconsider(lease, 1.0, may_move=False)
    assert known(here, prefix, lease.worker) == 0


def test_a_link_that_fails_is_left_alone_for_a_while() -> None:
    here = router(disaggregate_above=1)
    first, second = worker_of(here, "p0"), worker_of(here, "d0")
    assert [here.placer.links.failed(first, second, 1.0) for _ in range(3)] == [False, False, True]
    assert placed(here.submit(ask(LONG), 2.0)).prefill is None
    assert placed(here.submit(ask(LONG), 62.0)).prefill is not None


# Pairs


def test_each_pair_of_workers_has_its_own_link() -> None:
    """One decode worker is in the same rack, the other is not."""
    here = router(decodes=2, disaggregate_above=None)
    busy(here, "d0", 1)
    busy(here, "d1", 1)
    times = here.placer.transfer_times(MODEL)
    for _ in range(20):
        times.saw("p0", "d0", LONG, 30.0)
        times.saw("p0", "d1", LONG, 0.01)
    for _ in range(3):
        lease = placed(here.submit(ask(LONG), 0.0))
        assert lease.decision.route == "p0>d1"
        assert present(lease.decision.handover).transfer_s == pytest.approx(0.01, rel=0.3)
        here.leases.finish(lease, 0.0, Outcome.MOOT)


@pytest.mark.parametrize("rule", RULES)
def test_where_one_decode_worker_is_full_another_takes_it(rule: str) -> None:
    here = router_of(
        spec("p", Role.PREFILL), spec("d0", Role.DECODE), spec("d1", Role.DECODE),
        transfer=True, disaggregate_above=100, policy=rule,
    )  # fmt: skip
    for name, prompts in (("d0", (30_000, 30_000)), ("d1", (50, 50, 50))):
        worker_of(here, name).kv_capacity = 65_000
        here.fleet.roster.drain(name, draining=False)
        here.fleet.roster.drain("d1" if name == "d0" else "d0")
        for prompt in prompts:  # d0 has fewer requests, and hardly any room
            lease = placed(here.submit(ask(prompt), 0.0))
            here.leases.prefilled(lease, 1.0, None)
            here.leases.first_token(lease, 1.0)
    here.fleet.roster.drain("d0", draining=False)
    for _ in range(3):
        lease = placed(here.submit(ask(5000), 2.0))
        assert lease.decision.route == "p>d1"


# Room that does not come


CACHE = 140_000


def crowded(here: Router, count: int = 20) -> list[Lease]:
    """Give a decode worker a cache of which shorts hold so much that a large prompt has no room."""
    for worker in here.fleet.roster:
        worker.kv_capacity = CACHE
    leases = [placed(here.submit(ask(1000, 1000), 0.0)) for _ in range(count)]
    for lease in leases:
        here.leases.first_token(lease, 0.0)
    return leases


@pytest.mark.parametrize("rule", RULES)
def test_one_that_waits_for_room_for_long_is_served_whole(rule: str) -> None:
    here = router(disaggregate_above=1500, queue_wait_s=30.0, policy=rule)
    crowded(here)
    ticket = waits(here.submit(ask(110_000, 500), 1.0))
    assert here.due(15.0) == []
    [(ended, lease)] = here.due(16.0)
    assert ended is ticket
    assert placed(lease).prefill is None
    assert placed(lease).worker.name == "d0"
    assert why(here)[HandoverVerdict.NO_ROOM] == 1


def test_a_short_prompt_does_not_wait_for_room_to_be_handed_over() -> None:
    """Whole it stands in the worker's queue, as without prefill workers; a long one waits here."""
    here = router()
    worker = worker_of(here, "d0")
    worker.kv_capacity = CACHE
    for _ in range(5):
        one = ask(27_000, 1000)
        one.whole = "samples"
        here.leases.first_token(placed(here.submit(one, 0.0)), 0.0)
    for each in here.fleet.roster:
        each.pace.token_s, each.pace.fixed_s = 1e-4, 0.02
        each.reprice()
    lease = placed(here.submit(ask(20), 1.0))
    assert (lease.worker, lease.prefill) == (worker, None)
    waits(here.submit(ask(LONG), 1.0))


def test_of_those_that_wait_for_room_one_at_a_time_is_served_whole() -> None:
    here = router(disaggregate_above=1500, queue_wait_s=30.0)
    crowded(here)
    tickets = [waits(here.submit(ask(110_000, 500), 1.0)) for _ in range(3)]
    [(first, lease)] = here.due(20.0)
    assert first is tickets[0]
    assert here.due(21.0) == []
    here.leases.first_token(placed(lease), 22.0)
    [(second, _)] = here.due(22.0)
    assert second is tickets[1]
    [(third, refusal)] = here.due(31.0)
    assert third is tickets[2]
    assert refused(refusal).status == 429

"""The choice between whole and two legs, and of the workers."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.fleet.kv_links import FAILURES_TO_BAR
from proxy.core.fleet.leases import Attempts, Decision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.model.types import Outcome, Reason, RequestInfo, Usage
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.router import Router
from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.core.routing.registry import RULES
from proxy.core.tenants.tenants import Rank
from tests.present import present
from tests.proxy.core.making import (
    MODEL,
    idle,
    make_info,
    placed,
    pop_one,
    refused,
    router_of,
    spec,
    waits,
    worker_of,
    workers_named,
)

P, D = Role.PREFILL, Role.DECODE
LONG = 12_000


def make_router(*extra: WorkerSpec, prefills: int = 1, decodes: int = 1, **settings: Any) -> Router:
    specs = [spec(f"p{n}", P) for n in range(prefills)] + [spec(f"d{n}", D) for n in range(decodes)]
    return router_of(*specs, *extra, transfer=True, **settings)


def whole(prompt: int, output: int = 50) -> RequestInfo:
    """Return a request that cannot be split."""
    info = make_info(prompt, output)
    info.why_whole = "samples"
    return info


def place_decoding(router: Router, name: str = "d0", count: int = 4) -> None:
    """Place short requests that decode on a worker."""
    for _ in range(count):
        lease = placed(router.submit_again(whole(10, 1000), 0.0, Attempts(others(router, name))))
        router.leases.record_first_token(lease, 0.0)


def others(router: Router, name: str) -> frozenset[Worker]:
    return frozenset(w for w in router.fleet.roster if w.name != name)


def blocks_held(router: Router, prefix: tuple[int, ...], worker: Worker) -> int:
    """Return how many first blocks of a prompt a worker is believed to hold."""
    found = router.fleet.roster.prefixes.matches(prefix)
    return max((blocks for blocks, holders in found if holders >> worker.index & 1), default=0)


def verdicts(router: Router) -> dict[str, int]:
    return {key[1]: count for key, count in router.placer.handovers.items()}


# Auto


PAIR = spec("p0", P), spec("d0", D)


@pytest.mark.parametrize(
    ("specs", "decoding", "info", "route", "reason", "verdict"),
    [
        (PAIR, 1, make_info(LONG), "p0>d0", Reason.HANDOVER, HandoverVerdict.HANDED_OVER),
        (PAIR, 1, make_info(20), "d0", Reason.DECODE_POOL, HandoverVerdict.NOT_WORTH_IT),
        (PAIR, 0, make_info(LONG), "d0", Reason.DECODE_POOL, HandoverVerdict.NOT_WORTH_IT),
        (PAIR, 0, whole(LONG), "d0", Reason.DECODE_POOL, "samples"),
        (
            (*PAIR, spec("g0")),
            2,
            make_info(LONG),
            "g0",
            Reason.GENERAL_POOL,
            HandoverVerdict.ELSEWHERE,
        ),
        ((spec("g0"),), 0, make_info(LONG), "g0", Reason.ONLY_CHOICE, ""),
    ],
    ids=[
        "long",
        "short",
        "idle decode worker",
        "not to be split",
        "idle general worker",
        "general",
    ],
)
def test_verdict_about_a_request(
    specs: tuple[WorkerSpec, ...],
    decoding: int,
    info: RequestInfo,
    route: str,
    reason: Reason,
    verdict: str,
) -> None:
    router = router_of(*specs, transfer=True)
    if decoding:
        place_decoding(router, count=decoding)
    explained = router.placer.explain(info, 0.0)
    decision = placed(router.submit(info, 0.0)).decision
    assert (decision.route, decision.reason, decision.verdict) == (route, reason, verdict)
    assert getattr(explained, "verdict", None) == verdict
    assert verdicts(router).get(verdict, 0) == bool(verdict)


def test_expected_shorts_count_for_a_handover() -> None:
    """No request decodes now, but ten shorts a second would wait for the prefill."""
    router = make_router()
    for at in range(100):
        router.leases.finish(placed(router.submit(make_info(20), at / 10)), at / 10, Outcome.DONE)
    assert placed(router.submit(make_info(LONG), 10.0)).prefill is not None
    assert placed(router.submit(make_info(200), 10.0)).prefill is None


def test_simultaneous_longs_are_all_handed_over() -> None:
    """The decoding requests would get almost no tokens for the time of the prefills."""
    router = make_router()
    place_decoding(router, count=4)
    routes = [placed(router.submit(make_info(LONG), 0.0)).decision.route for _ in range(3)]
    assert routes == ["p0>d0"] * 3


def test_decode_pace_is_taken_from_the_prefill_worker_for_longs() -> None:
    """A decode worker sees short prompts only, and their tokens are cheap."""
    router = make_router()
    place_decoding(router, count=1)
    first, second = worker_of(router, "p0").pace, worker_of(router, "d0").pace
    first.token_s, second.token_s = 2e-4, 2e-5
    worker_of(router, "d0").reprice()
    assert (
        placed(router.submit(make_info(LONG), 0.0)).prefill is None
    )  # the length is not learned yet
    first.learn_handover_tokens(LONG)
    assert placed(router.submit(make_info(LONG), 0.0)).prefill is not None
    assert placed(router.submit(make_info(100), 0.0)).prefill is None


def test_prompt_length_is_learnt_for_prefill_workers() -> None:
    router = make_router(disaggregate_above=1)
    for size in (LONG, LONG, 2000):
        lease = placed(router.submit(make_info(size), 0.0))
        router.leases.end_prefill(lease, 1.0, None)
        router.leases.finish(lease, 2.0, Outcome.DONE)
    assert worker_of(router, "p0").pace.handover_tokens == pytest.approx(11_000)
    assert worker_of(router, "d0").pace.handover_tokens == 0.0


def test_longer_prefill_on_the_decode_worker_adds_to_the_ttft() -> None:
    router = make_router(disaggregate_above=1)
    worker = worker_of(router, "d0")
    placed(router.submit(whole(6 * LONG), 0.0))
    wait_s = worker.wait_s(0.0, for_long=False)
    lease = placed(router.submit(make_info(LONG), 0.0))
    handover = present(lease.decision.handover)
    assert wait_s > 2 * handover.prefill_s
    foreseen_s = wait_s + handover.transfer_s + worker.pace.step_s(0)
    assert lease.decision.predicted_ttft_s == pytest.approx(foreseen_s)


def test_handover_with_a_too_long_wait_is_refused() -> None:
    early = AdmissionSettings({Rank.STANDARD: 2.0})
    for ahead in (0, 6 * LONG):  # tokens that the decode worker prefills: 7.2 s
        router = make_router(disaggregate_above=1, admission=early)
        for worker in router.fleet.roster:
            worker.pace.prefills, worker.pace.token_s, worker.pace.fixed_s = 100, 1e-4, 0.0
            worker.reprice()
        if ahead:
            assert placed(router.submit(whole(ahead), 0.0)).worker.name == "d0"
            assert refused(router.submit(make_info(LONG), 0.0)).reason is Reason.TOO_SLOW
        else:
            assert placed(router.submit(make_info(LONG), 0.0)).prefill is not None


# A threshold


@pytest.mark.parametrize("rule", RULES)
def test_threshold_counts_tokens(rule: str) -> None:
    router = make_router(policy=rule, disaggregate_above=500)
    assert placed(router.submit(make_info(501), 0.0)).prefill is not None
    assert placed(router.submit(make_info(500), 0.0)).prefill is None


@pytest.mark.parametrize("above", [None, 2000])
@pytest.mark.parametrize("stream", [True, False])
def test_prefix_in_transfer_is_not_held_by_the_decode_worker(
    above: int | None, stream: bool
) -> None:
    """Otherwise the decode worker would compute all but the first of many questions at once."""
    router = make_router(disaggregate_above=above)
    place_decoding(router)
    prefix = tuple(range(1, 96))

    def submit(now: float) -> Lease:
        return placed(router.submit(make_info(LONG, prefix=prefix, stream=stream), now))

    leases = [submit(0.0) for _ in range(4)]
    assert all(lease.prefill is not None for lease in leases)
    d0 = leases[0].worker
    assert blocks_held(router, prefix, d0) == 0
    first = present(leases[0].prefill)
    assert blocks_held(router, prefix, first.worker) == len(prefix)
    router.leases.end_prefill(leases[0], 2.0, None)
    assert router.leases.recheck_decode_worker(leases[0], 2.0, may_move=True)
    assert (submit(2.0).prefill is None) != stream  # the first token shows that it has arrived
    if stream:
        router.leases.record_first_token(leases[0], 2.1)
    assert blocks_held(router, prefix, d0) == len(prefix)
    assert submit(2.2).prefill is None


# The choice of the pair


def test_prefill_worker_with_the_least_wait_is_chosen() -> None:
    router = make_router(prefills=3, disaggregate_above=1)
    first = [placed(router.submit(make_info(1000), 0.0)).prefill for _ in range(3)]
    assert {lease.worker.name for lease in first if lease} == {"p0", "p1", "p2"}


def test_prefill_worker_with_the_prefix_is_chosen() -> None:
    router = make_router(prefills=3, decodes=2, disaggregate_above=1)
    prefix = tuple(range(8))
    lease = placed(router.submit(make_info(1000, prefix=prefix), 0.0))
    holder = present(lease.prefill).worker
    router.leases.end_prefill(lease, 1.0, Usage(1000))
    retry = Attempts(frozenset([lease.worker]))
    again = placed(router.submit_again(make_info(1000, prefix=prefix), 2.0, retry))
    assert present(again.prefill).worker is holder


def test_prompt_above_the_cache_size_is_handed_over() -> None:
    router = make_router(disaggregate_above=100)
    router.fleet.health.set_gauges("d0", Gauges(0.0, kv_capacity_tokens=3000))
    assert placed(router.submit(make_info(4000, 100), 0.0)).prefill is not None


def test_prompt_above_the_prefill_limit_is_served_whole() -> None:
    specs = spec("p0", P, limit=1000), spec("d0", D)
    router = router_of(*specs, transfer=True, disaggregate_above=1)
    assert placed(router.submit(make_info(1000), 0.0)).prefill is None
    assert placed(router.submit(make_info(900), 0.0)).prefill is not None
    assert verdicts(router) == {HandoverVerdict.PREFILL_BUSY: 1, HandoverVerdict.HANDED_OVER: 1}


def test_failed_link_is_counted_only_above_the_threshold() -> None:
    specs = spec("p0", P), spec("d0", D), spec("d1", D)
    router = router_of(*specs, transfer=True, disaggregate_above=LONG - 1)
    for _ in range(3):
        router.placer.links.record_failure(worker_of(router, "p0"), worker_of(router, "d0"), 1.0)
    for size in (10, LONG):
        lease = placed(
            router.submit_again(make_info(size), 1.0, Attempts(workers_named(router, "d1")))
        )
        assert (lease.prefill, lease.worker.name) == (None, "d0")
    assert verdicts(router) == {HandoverVerdict.NOT_WORTH_IT: 1, HandoverVerdict.PREFILL_BUSY: 1}


def test_no_handover_without_a_connector() -> None:
    router = router_of(spec("p0", P), spec("d0", D), disaggregate_above=1)
    assert placed(router.submit(make_info(LONG), 0.0)).prefill is None
    assert router.placer.handovers == {}


# Failures


def test_failed_prefills_are_retried_then_served_whole() -> None:
    router = make_router(prefills=3, disaggregate_above=1)
    info, tried = make_info(LONG), frozenset[Worker]()
    names = []
    for attempt in range(3):
        again = router.submit_again(info, 0.0, Attempts(tried)) if tried else None
        lease = placed(again or router.submit(info, 0.0))
        leg = lease.running_leg
        names.append(leg.worker.name)
        if attempt < 2:
            router.leases.finish(lease, 0.0, Outcome.FAILED)
            tried |= {leg.worker}
    assert len(set(names)) == 3
    assert names[2] == "d0"
    failures = [not w.breaker.has_no_failures for w in router.fleet.roster if w.role is P]
    assert sorted(failures) == [False, True, True]
    assert worker_of(router, "d0").breaker.has_no_failures


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED, Outcome.CLIENT_GONE])
@pytest.mark.parametrize("before", [0, 2])
def test_failed_prefill_records_no_prefix_at_the_decode_worker(
    outcome: Outcome, before: int
) -> None:
    """Otherwise the retry would compute all of the prompt on the decode worker."""
    router = make_router(prefills=2, disaggregate_above=256)
    blocks = tuple(range(1, 97))
    d0 = worker_of(router, "d0")
    router.fleet.roster.prefixes.record(blocks[:before], d0.index)
    info = make_info(LONG, prefix=blocks)
    lease = placed(router.submit(info, 0.0))
    tokens = present(lease.decision.handover).tokens
    first = lease.running_leg.worker
    router.leases.finish(lease, 1.0, outcome)
    assert blocks_held(router, blocks, d0) == before
    again = placed(router.submit_again(info, 1.0, Attempts(frozenset([first]))))
    assert again.decision.handover is not None
    assert again.decision.handover.prefill is not first
    assert again.decision.handover.tokens == tokens
    router.leases.end_prefill(again, 2.0, None)
    assert blocks_held(router, blocks, d0) == before
    router.leases.record_first_token(again, 2.5)
    router.leases.finish(again, 3.0, Outcome.FAILED)  # the blocks had arrived by then
    assert blocks_held(router, blocks, d0) == len(blocks)


# Charges


def charges(router: Router, name: str) -> tuple[int, ...]:
    w = worker_of(router, name)
    return w.requests, w.sequences, w.prefill_tokens, w.decode_tokens, w.kv_tokens, w.num_decoding


@pytest.mark.parametrize("stream", [True, False])
def test_both_workers_are_charged_at_once_and_released_in_turn(stream: bool) -> None:
    router = make_router(disaggregate_above=1)
    lease = placed(router.submit(make_info(1000, 50, stream=stream), 0.0))
    assert charges(router, "p0") == (1, 1, 1000, 0, 1000, 0)
    assert charges(router, "d0") == (1, 0, 0, 50, 1050, 0)
    router.leases.record_first_token(lease, 0.1)  # ignored: nothing was sent there yet
    assert charges(router, "d0") == (1, 0, 0, 50, 1050, 0)
    router.leases.end_prefill(lease, 0.5, Usage(1000))
    router.leases.end_prefill(lease, 0.5, Usage(1000))
    assert charges(router, "p0") == (0, 0, 0, 0, 0, 0)
    assert charges(router, "d0") == (1, 1, 0, 50, 1050, 0)
    if stream:
        router.leases.record_first_token(lease, 0.6)
        router.leases.record_first_token(lease, 0.7)
    else:
        router.fleet.start_due_decodes(5.0)
    assert charges(router, "d0") == (1, 1, 0, 50, 1050, 1)
    router.leases.record_tokens(lease, 20)
    assert charges(router, "d0") == (1, 1, 0, 30, 1050, 1)
    router.leases.finish(lease, 9.0, Outcome.DONE, Usage(1000, 50))
    assert idle(router.fleet.roster)


# Learning


def test_legs_teach_prefill_pace_and_transfer_time() -> None:
    router = make_router(disaggregate_above=1)
    for at in range(40):
        now = at * 10.0
        lease = placed(router.submit(make_info(2000, 50), now))
        router.leases.end_prefill(lease, now + 0.8, Usage(2000))
        step_s = lease.worker.pace.step_s(0)
        router.leases.record_first_token(lease, now + 0.8 + 0.3 + step_s)
        router.leases.finish(lease, now + 3.0, Outcome.DONE, Usage(2000, 50))
    prefill, decode = worker_of(router, "p0"), worker_of(router, "d0")
    assert prefill.pace.first_token_s(2000) == pytest.approx(0.8, rel=0.1)
    assert router.placer.transfer_times[MODEL].all.seconds(2000) == pytest.approx(0.3, rel=0.1)
    assert decode.pace.prefills == 0  # no prefill ran on it
    lease = placed(router.submit(make_info(2000, 50), 999.0))
    assert present(lease.decision.handover).transfer_s == pytest.approx(0.3, rel=0.1)
    assert lease.decision.predicted_ttft_s == pytest.approx(1.1, rel=0.15)


def test_end_without_a_stream_teaches_the_decode_step_time() -> None:
    router, now = make_router(disaggregate_above=1), 0.0
    pace = worker_of(router, "d0").pace
    for _ in range(80):
        lease = placed(router.submit(make_info(LONG, 100, stream=False), now))
        now += 1.0
        router.leases.end_prefill(lease, now, None)
        now += present(lease.decision.handover).transfer_s + 100 * 0.03
        if router.leases.may_learn(lease, now):
            router.leases.finish(lease, now, Outcome.DONE, Usage(LONG, 100))
        else:
            router.leases.finish(lease, now, Outcome.DONE)
        now += 10.0
    assert pace.step_s(0.5) == pytest.approx(0.03, rel=0.15)
    assert pace.steps_learnable_at > now - 10.0  # not every end teaches


def test_cached_tokens_of_a_handover_count_for_the_prefill_worker() -> None:
    router = make_router(disaggregate_above=1)
    prefix = tuple(range(8))
    lease = placed(router.submit(make_info(1000, prefix=prefix), 0.0))
    router.leases.end_prefill(lease, 0.5, Usage(1000, 1, 0))
    router.leases.finish(lease, 1.0, Outcome.DONE, Usage(1000, 50, 900))
    assert not worker_of(router, "d0").reports_cache
    before = worker_of(router, "p0").pace.evicted_share
    for _ in range(20):
        info = make_info(9000, prefix=prefix)
        lease = placed(router.submit(info, 2.0))
        router.leases.end_prefill(lease, 2.5, Usage(9000, 1, 1))
        router.leases.finish(lease, 3.0, Outcome.DONE)
    assert worker_of(router, "p0").pace.evicted_share > before


# Explanations


def explained(router: Router, info: RequestInfo) -> tuple[str, dict[str, str]]:
    decision = router.placer.explain(info, 0.0)
    by = {score.worker: score.prefill_by or score.note for score in decision.scores}
    return getattr(decision, "route", ""), by


@pytest.mark.parametrize("rule", RULES)
def test_explain_names_both_workers_and_charges_none(rule: str) -> None:
    router = make_router(disaggregate_above=100, policy=rule)
    route, by = explained(router, make_info(1000))
    assert route == "p0>d0"
    for prompt, verdict in (
        (1000, HandoverVerdict.HANDED_OVER),
        (50, HandoverVerdict.NOT_WORTH_IT),
    ):
        decision = router.placer.explain(make_info(prompt), 0.0)
        assert isinstance(decision, Decision)
        assert decision.verdict == verdict
    assert by["p0"] == "prefills only"
    if rule == "adaptive":
        assert by["d0"] == "p0"
    assert idle(router.fleet.roster)


def test_explain_says_that_a_prefill_worker_is_down() -> None:
    """Its links and its role are not the reason."""
    router = make_router(disaggregate_above=100)
    prefill, decode = worker_of(router, "p0"), worker_of(router, "d0")
    for _ in range(FAILURES_TO_BAR):
        router.placer.links.record_failure(prefill, decode, 0.0)
    assert explained(router, make_info(1000))[1]["p0"].startswith("prefills nothing for d0")
    for _ in range(router.fleet.health.down_after):
        router.fleet.health.probe_failed("p0", "refused")
    assert explained(router, make_info(1000))[1]["p0"] == "down: refused"


# In time


def test_no_handover_to_a_worker_that_would_fetch_too_late() -> None:
    """Its own prefills come first, and the blocks would have expired by then."""
    router = make_router(disaggregate_above=1, transfer_within_s=24.0)
    assert placed(router.submit(make_info(LONG), 0.0)).prefill is not None
    decode = worker_of(router, "d0")
    decode.pace.token_s = 1e-3
    placed(router.submit(whole(30_000), 0.0))
    alone = placed(router.submit(make_info(LONG), 0.0))
    assert alone.prefill is None
    router.leases.finish(alone, 0.0, Outcome.MOOT)
    later = placed(router.submit(make_info(LONG), 10.0))  # a third of the prefill is done
    assert later.prefill is not None


@pytest.mark.parametrize("above", [None, 1])
def test_no_handover_if_the_transfer_outlasts_the_blocks(above: int | None) -> None:
    router = make_router(disaggregate_above=above, transfer_within_s=24.0)
    place_decoding(router, count=1)
    for _ in range(50):
        router.placer.transfer_times[MODEL].all.learn(LONG, 30.0)
    assert placed(router.submit(make_info(LONG), 0.0)).prefill is None
    assert placed(router.submit(make_info(LONG // 2), 0.0)).prefill is not None or above is None


def test_time_spent_reduces_the_time_left_to_fetch() -> None:
    router = make_router(decodes=2, disaggregate_above=1, transfer_within_s=24.0)
    lease = placed(router.submit(make_info(LONG), 0.0))
    busy_one, handover = lease.worker, lease.decision.handover
    present(handover).transfer_s = 5.0
    router.leases.end_prefill(lease, 1.0, None)
    assert router.leases.recheck_decode_worker(lease, 1.0, may_move=False, spent_s=18.0)
    assert not router.leases.recheck_decode_worker(lease, 1.0, may_move=True, spent_s=20.0)
    busy_one.pace.token_s = 1e-3
    placed(router.submit_again(whole(10_000), 1.0, Attempts(others(router, busy_one.name))))
    assert router.leases.recheck_decode_worker(lease, 1.0, may_move=False, spent_s=8.0)
    assert not router.leases.recheck_decode_worker(lease, 1.0, may_move=False, spent_s=10.0)
    assert router.leases.recheck_decode_worker(lease, 1.0, may_move=True, spent_s=10.0)
    assert lease.worker is not busy_one


@pytest.mark.parametrize(("spent_s", "reconsidered"), [(8.0, True), (24.5, False)])
def test_only_decode_worker_is_used_while_down_within_the_limit(
    spent_s: float, reconsidered: bool
) -> None:
    router = make_router(disaggregate_above=1, transfer_within_s=24.0)
    lease = placed(router.submit(make_info(LONG), 0.0))
    router.leases.end_prefill(lease, 1.0, None)
    lease.worker.up = False
    found = router.leases.recheck_decode_worker(lease, 1.0, may_move=True, spent_s=spent_s)
    assert found is reconsidered


@pytest.mark.parametrize("stream", [True, False])
def test_prefix_is_recorded_for_the_final_decode_worker_only(stream: bool) -> None:
    router = make_router(decodes=2, disaggregate_above=1)
    prefix, had = tuple(range(1, 9)), {"d0": 2, "d1": 3}
    for name, blocks in had.items():
        router.fleet.roster.prefixes.record(prefix[:blocks], worker_of(router, name).index)
    lease = placed(router.submit(make_info(LONG, prefix=prefix, stream=stream), 0.0))
    router.leases.end_prefill(lease, 1.0, None)
    first = lease.worker
    first.up = False
    assert router.leases.recheck_decode_worker(lease, 1.0, may_move=True)
    second = lease.worker
    assert second is not first
    router.leases.record_first_token(lease, 1.1)
    assert blocks_held(router, prefix, first) == had[first.name]
    assert blocks_held(router, prefix, second) == 8


# Pairs


def test_transfer_time_is_learnt_per_pair() -> None:
    """One decode worker is in the same rack, the other in another."""
    router = make_router(decodes=2, disaggregate_above=None)
    place_decoding(router, "d0", 1)
    place_decoding(router, "d1", 1)
    times = router.placer.transfer_times[MODEL]
    for _ in range(20):
        times.learn("p0", "d0", LONG, 30.0)
        times.learn("p0", "d1", LONG, 0.01)
    for _ in range(3):
        lease = placed(router.submit(make_info(LONG), 0.0))
        assert lease.decision.route == "p0>d1"
        assert present(lease.decision.handover).transfer_s == pytest.approx(0.01, rel=0.3)
        router.leases.finish(lease, 0.0, Outcome.MOOT)


@pytest.mark.parametrize("rule", RULES)
def test_handover_avoids_a_full_decode_worker(rule: str) -> None:
    router = make_router(decodes=2, disaggregate_above=100, policy=rule)
    for name, prompts in (("d0", (30_000, 30_000)), ("d1", (50, 50, 50))):
        worker_of(router, name).kv_capacity = 65_000
        router.fleet.roster.drain(name, draining=False)
        router.fleet.roster.drain("d1" if name == "d0" else "d0")
        for prompt in prompts:  # d0 has fewer requests and less room
            lease = placed(router.submit(make_info(prompt), 0.0))
            router.leases.end_prefill(lease, 1.0, None)
            router.leases.record_first_token(lease, 1.0)
    router.fleet.roster.drain("d0", draining=False)
    for _ in range(3):
        assert placed(router.submit(make_info(5000), 2.0)).decision.route == "p0>d1"


# Waiting for KV cache room


CACHE = 140_000


def fill_cache(router: Router) -> None:
    """Fill a decode worker's KV cache with shorts so that a large prompt has no room."""
    for worker in router.fleet.roster:
        worker.kv_capacity = CACHE
    for lease in [placed(router.submit(make_info(1000, 1000), 0.0)) for _ in range(20)]:
        router.leases.record_first_token(lease, 0.0)


@pytest.mark.parametrize("rule", RULES)
def test_request_without_room_is_served_whole_after_a_wait(rule: str) -> None:
    router = make_router(disaggregate_above=1500, queue_wait_s=30.0, policy=rule)
    fill_cache(router)
    ticket = waits(router.submit(make_info(110_000, 500), 1.0))
    assert router.pop_due(15.0) == []
    ended, lease = pop_one(router, 16.0)
    assert ended is ticket
    assert (placed(lease).prefill, placed(lease).worker.name) == (None, "d0")
    assert verdicts(router)[HandoverVerdict.NO_ROOM] == 1


def test_short_prompt_does_not_wait_for_room() -> None:
    """Served whole it waits in the worker's queue; a long prompt waits in the router's."""
    router = make_router()
    decode = worker_of(router, "d0")
    decode.kv_capacity = CACHE
    for _ in range(5):
        router.leases.record_first_token(placed(router.submit(whole(27_000, 1000), 0.0)), 0.0)
    for worker in router.fleet.roster:
        worker.pace.token_s, worker.pace.fixed_s = 1e-4, 0.02
        worker.reprice()
    lease = placed(router.submit(make_info(20), 1.0))
    assert (lease.worker, lease.prefill) == (decode, None)
    waits(router.submit(make_info(LONG), 1.0))


def test_requests_without_room_are_served_whole_one_at_a_time() -> None:
    router = make_router(disaggregate_above=1500, queue_wait_s=30.0)
    fill_cache(router)
    tickets = [waits(router.submit(make_info(110_000, 500), 1.0)) for _ in range(3)]
    first, lease = pop_one(router, 20.0)
    assert first is tickets[0]
    assert router.pop_due(21.0) == []
    router.leases.record_first_token(placed(lease), 22.0)
    assert pop_one(router, 22.0)[0] is tickets[1]
    third, refusal = pop_one(router, 31.0)
    assert (third, refused(refusal).status) == (tickets[2], 429)


@pytest.mark.parametrize("running", [0, 1])
def test_requests_of_other_clients_that_decode_count_for_a_handover(running: int) -> None:
    router = make_router()
    for second in (1.0, 2.0):
        router.fleet.health.set_gauges("d0", Gauges(at=second, running=running))
    assert (placed(router.submit(make_info(1000), 2.0)).prefill is not None) is bool(running)

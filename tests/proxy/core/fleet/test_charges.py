"""Charges of requests to workers."""

from __future__ import annotations

from math import inf

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Decision, HandoverDecision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.lifecycle.feedback import update_breaker
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Reason, RequestInfo
from tests.proxy.core.making import fleet_of, idle, make_info, members, spec


def charge(fleet: Fleet, request: RequestInfo, now: float = 0.0, *, cached: int = 0) -> Lease:
    """Charge the request to the first worker."""
    decision = Decision(members(fleet)[0], Reason.ONLY_CHOICE, cached_tokens=cached)
    return fleet.charge(request, decision, now)


@pytest.fixture
def fleet() -> Fleet:
    """Return a fleet of one worker."""
    return fleet_of(spec("a"))


@pytest.fixture
def worker(fleet: Fleet) -> Worker:
    """Return the only worker."""
    return members(fleet)[0]


def test_cached_prompt_tokens_are_not_charged_as_prefill(fleet: Fleet, worker: Worker) -> None:
    worker.pace.evicted_share = 0.0
    charge(fleet, make_info(1000), cached=900)
    assert (worker.prefill_tokens, worker.kv_tokens) == (100, 1050)


@pytest.mark.parametrize("reports", [True, False])
def test_a_reporting_worker_is_soon_not_expected_to_have_an_ended_prompt(
    fleet: Fleet, worker: Worker, reports: bool
) -> None:
    prefixes = fleet.roster.prefixes
    worker.reports_prefixes = reports
    if reports:
        prefixes.follow(worker.index)
    lease = charge(fleet, make_info(1000, prefix=(1, 2)))
    fleet.roster.expect_prefix(lease.info, worker)
    for _ in range(2):
        prefixes.drop_ended()
    fleet.release(lease)
    prefixes.drop_ended()
    assert prefixes.matches((1, 2)) == [(2, worker.bit)]
    prefixes.drop_ended()
    assert bool(prefixes.matches((1, 2))) is not reports


def test_request_is_charged_as_prefill_until_its_first_token(fleet: Fleet, worker: Worker) -> None:
    lease = charge(fleet, make_info(1000, 50, samples=2, long=True))
    assert (worker.requests, worker.sequences) == (1, 2)
    assert (worker.prefill_tokens, worker.long_tokens, worker.decode_tokens) == (1000, 1000, 100)
    assert (worker.kv_tokens, worker.num_decoding) == (1100, 0)
    for _ in range(2):
        fleet.record_first_token(lease, 1.0)
        assert (worker.prefill_tokens, worker.long_tokens, worker.num_decoding) == (0, 0, 2)
    assert lease.first_token_at == 1.0
    assert worker.pace.prefills == 1


def test_requests_without_compute_do_not_change_the_pace(fleet: Fleet, worker: Worker) -> None:
    """A /tokenize is answered at once, even beside a long or hung prefill."""
    charge(fleet, make_info(20_000))
    known = (worker.pace.token_s, worker.pace.fixed_s, worker.free_at, worker.due_at)
    for n in range(1, 4):
        lease = charge(fleet, make_info(0, None, generates=False), 0.1 * n)
        assert (worker.requests, worker.prefill_tokens) == (2, 20_000)
        fleet.record_first_token(lease, 0.1 * n + 0.003)
        update_breaker(fleet, lease, 0.1 * n + 0.004, Outcome.DONE)
        fleet.release(lease)
    assert (worker.pace.token_s, worker.pace.fixed_s, worker.free_at, worker.due_at) == known
    assert worker.pace.prefills == 0
    assert (worker.requests, worker.prefill_tokens) == (1, 20_000)


@pytest.mark.parametrize(("limit", "steps", "left"), [
    (None, [20], 30), (None, [50], 50), (None, [20, 40], 40), (None, [30, 90], 30),
    (80, [60], 20), (80, [50, 10, 15], 5), (80, [80], 0), (80, [50, 30], 0), (80, [500], 0),
])  # fmt: skip
def test_decode_charge_doubles_when_the_estimate_is_reached(
    fleet: Fleet, worker: Worker, limit: int | None, steps: list[int], left: int
) -> None:
    """Up to the output limit, so that its KV cache is not counted as free."""
    request = make_info(100, limit, samples=2)
    request.expected_output = 25
    if limit is not None:
        request.output_tokens = limit // 2
    lease = charge(fleet, request)
    for step in steps:
        fleet.record_tokens(lease, step)
    assert worker.decode_tokens == lease.decode_tokens == left
    fleet.release(lease)
    assert idle(fleet.roster)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("written", [0, 20, 999])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("generates", [False, True])
def test_release_returns_every_charge_once(
    fleet: Fleet, worker: Worker, begun: bool, written: int, stream: bool, generates: bool
) -> None:
    lease = charge(
        fleet, make_info(1000, 50, samples=3, stream=stream, generates=generates, long=True)
    )
    other = charge(fleet, make_info(7, 7))
    if begun:
        fleet.record_first_token(lease, 1.0)
    fleet.record_tokens(lease, written)
    assert fleet.release(lease)
    assert not fleet.release(lease)
    fleet.record_first_token(lease, 2.0)
    fleet.record_tokens(lease, 5)
    assert worker.requests == 1
    assert worker.prefill_tokens == 7
    fleet.release(other)
    assert idle(fleet.roster)


def test_settle_moves_a_non_streaming_request_to_decode(fleet: Fleet, worker: Worker) -> None:
    lease = charge(fleet, make_info(1000, 50, stream=False))
    fleet.start_due_decodes(0.01)
    assert worker.num_decoding == 0
    fleet.start_due_decodes(10.0)
    assert (worker.num_decoding, worker.prefill_tokens) == (1, 0)
    assert worker.pace.prefills == 0  # no first token was seen
    fleet.release(lease)
    released = charge(fleet, make_info(1000, 50, stream=False), 10.0)
    fleet.release(released)
    fleet.start_due_decodes(20.0)
    assert idle(fleet.roster)


def test_wait_shrinks_with_time_and_restarts_when_overdue(fleet: Fleet, worker: Worker) -> None:
    worker.pace.token_s, worker.pace.fixed_s = 1e-3, 0.1
    lease = charge(fleet, make_info(10_000))
    waits = [worker.wait_s(now, for_long=False) for now in (0.0, 5.0, 9.9, 10.1, 60.1)]
    assert waits == pytest.approx([10.0, 5.0, 2.0, 2.0, 52.0])
    fleet.record_first_token(lease, 61.0)
    assert worker.wait_s(61.0, for_long=False) == 0.0


def test_first_token_restarts_the_time_of_the_remaining_prefills(
    fleet: Fleet, worker: Worker
) -> None:
    worker.pace.token_s, worker.pace.fixed_s = 1e-3, 0.0
    worker.pace.first_token_learnable_at = inf  # this prefill must teach nothing
    first = charge(fleet, make_info(1000))
    charge(fleet, make_info(1000), 0.5)
    assert worker.wait_s(4.0, for_long=False) == pytest.approx(0.4 + 3.0)
    fleet.record_first_token(first, 4.0)
    assert worker.wait_s(4.0, for_long=False) == pytest.approx(1.0)


def test_short_waits_behind_longs_by_the_passing_share(fleet: Fleet, worker: Worker) -> None:
    worker.pace.token_s, worker.pace.long_share = 1e-3, 0.1
    charge(fleet, make_info(9000, long=True))
    charge(fleet, make_info(1000))
    assert worker.wait_s(0.0, for_long=True) == pytest.approx(10.0)
    assert worker.wait_s(0.0, for_long=False) == pytest.approx(1.9)


def test_move_transfers_all_charges_of_a_decode_leg() -> None:
    fleet = fleet_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE), spec("d1", Role.DECODE))
    prefill, decode, other = members(fleet)
    legs = HandoverDecision(prefill, 0, 1000, 1.0, 0.1)
    decision = Decision(decode, Reason.HANDOVER, handover=legs)
    lease = fleet.charge(make_info(1000, 50), decision, 0.0)
    fleet.move(lease, other, 1.0)  # no effect before the prefill is done
    assert lease.worker is decode
    fleet.hand_over(lease, 1.0)
    fleet.move(lease, other, 1.0)
    assert idle([prefill, decode])
    assert (other.requests, other.sequences) == (1, 1)
    assert (other.decode_tokens, other.kv_tokens) == (50, 1050)
    assert (lease.worker, lease.decision.worker) == (other, other)
    fleet.record_first_token(lease, 2.0)
    fleet.move(lease, decode, 2.0)  # no effect after the first token
    assert lease.worker is other
    fleet.release(lease)
    assert idle([prefill, decode, other])


@pytest.mark.parametrize("generates", [True, False])
def test_first_token_after_its_due_time_counts_no_request_twice(
    fleet: Fleet, worker: Worker, generates: bool
) -> None:
    lease = charge(fleet, make_info(1000, 50, samples=2, stream=False, generates=generates))
    fleet.start_due_decodes(60.0)
    fleet.record_first_token(lease, 61.0)
    assert (worker.prefill_tokens, worker.num_decoding) == (0, 2 if generates else 0)
    fleet.release(lease)
    assert idle([worker])


def test_handed_over_request_that_is_silent_decodes_once() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("d", Role.DECODE))
    prefill, decode = members(fleet)
    legs = HandoverDecision(prefill, 0, 1000, 1.0, 0.1)
    decision = Decision(decode, Reason.HANDOVER, handover=legs)
    lease = fleet.charge(make_info(1000, 50, samples=2, stream=False), decision, 0.0)
    fleet.hand_over(lease, 1.0)
    assert decode.num_decoding == 0
    for event in (fleet.start_due_decodes, lambda now: fleet.record_first_token(lease, now)):
        event(60.0)
        assert decode.num_decoding == 2
    fleet.release(lease)
    assert idle([prefill, decode])

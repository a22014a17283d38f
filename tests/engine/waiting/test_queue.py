"""The waiting queue of lanes, against upstream's queue and by its own rules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.request import Request

from tests.engine.schedulers import make_request
from vllm_sched.engine.waiting.lane_counts import LaneKey
from vllm_sched.engine.waiting.queue import MAX_RETRIES, LaneQueue
from vllm_sched.policies.types import Gate


class FakeRules:
    """Rules with lanes by prompt length, and gates that the test sets."""

    has_deadlines = True

    def __init__(self) -> None:
        self.gates = {("short",): Gate.OPEN, ("long",): Gate.OPEN}
        self.urgency = {("short",): 0.0, ("long",): 0.0}
        self.waits: list[float] = []  # of asked gates
        self.now = 0.0
        self.limit = 10
        self.read = 0
        self.left_s: dict[int, float] = {}  # by tokens

    def lane_key_of(self, request: Request) -> LaneKey:
        return ("long" if request.num_tokens > self.limit else "short",)

    def gate_of(self, lane_key: LaneKey, _: Request, waited: float) -> Gate:
        self.waits.append(waited)
        assert 0 <= waited <= 50  # no test waits longer
        return self.gates[lane_key]

    def urgency_of(self, lane_key: LaneKey, *_: Any) -> tuple[float, ...]:
        return (self.urgency[lane_key],)

    def deadline(self, request: Request, since: float) -> float:
        return since + self.left_s.get(request.num_tokens, 0.0)

    def adapter_without_slot(self, _: Request) -> int:
        return 0

    def open_adapters(self) -> None:
        return None

    def awaits_grammar(self, _: Request) -> bool:
        return False

    def blocks_read(self) -> int:
        return self.read


class OfTwoPolicies(FakeRules):
    """The same, beside a policy with a single lane."""

    def lane_key_of(self, request: Request) -> LaneKey:
        return (*super().lane_key_of(request), "")

    def gate_of(self, lane_key: LaneKey, head: Request, waited: float) -> Gate:
        return super().gate_of(lane_key[:1], head, waited)

    def urgency_of(self, lane_key: LaneKey, *_: Any) -> tuple[float, ...]:
        return super().urgency_of(lane_key[:1])


Made = tuple[FakeRules, Any, list[Request]]


def queue_of(*tokens: int, rules: FakeRules | None = None, by_priority: bool = False) -> Made:
    """Return a queue with requests of so many tokens, its rules, and the requests."""
    rules = rules or FakeRules()
    queue = LaneQueue(
        rules,
        by_priority=by_priority,
        clock=lambda: rules.now,
        num_policies=2 if isinstance(rules, OfTwoPolicies) else 1,
    )
    requests = [make_request(each, hashed=False) for each in tokens]
    for request in requests:
        queue.add_request(request)
    return rules, queue, requests


def admit_all(queue: Any) -> list[Request]:
    """Peek and pop until no request may enter."""
    out = []
    while queue:
        offered = queue.peek_request()
        assert queue.pop_request() is offered
        out.append(offered)
    return out


@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_queue_with_open_gates_matches_upstreams(by_priority: bool, seed: int) -> None:
    rng = random.Random(seed)
    _, queue, _ = queue_of(by_priority=by_priority)
    upstream: Any = PriorityRequestQueue() if by_priority else FCFSRequestQueue()
    for _ in range(300):
        action = rng.random()
        if action < 0.5:
            request = make_request(rng.choice([5, 20]), priority=rng.randrange(4))
            queue.add_request(request)
            upstream.add_request(request)
        elif action < 0.6 and upstream:
            gone = rng.sample(list(upstream), k=min(3, len(upstream)))
            queue.remove_requests(gone)
            upstream.remove_requests(gone)
        elif action < 0.75 and upstream:
            # The scan skips a few and puts them back, the way upstream does; the next step begins.
            number = min(len(upstream), 3)
            skipped = [upstream.pop_request() for _ in range(number)][::-1]
            assert [queue.pop_request() for _ in range(number)][::-1] == skipped
            queue.prepend_requests(skipped)
            upstream.prepend_requests(skipped)
            queue.end_step()
            queue.begin_step(0.0)
        elif upstream:
            assert queue.peek_request() is upstream.peek_request()
            assert queue.pop_request() is upstream.pop_request()
        assert len(queue) == len(upstream)
        assert list(queue) == list(upstream)
    assert admit_all(queue) == [upstream.pop_request() for _ in range(len(upstream))]


# Order


def test_earliest_due_request_of_a_lane_enters_first() -> None:
    rules = FakeRules()
    rules.left_s = {5: 30.0, 6: 30.0, 7: 10.0}
    _, queue, (first, second, dated) = queue_of(5, 6, 7, rules=rules)
    queue.begin_step(0.0)
    assert admit_all(queue) == [dated, first, second]


def test_preempted_request_enters_before_an_earlier_deadline() -> None:
    rules = FakeRules()
    rules.left_s = {5: 30.0, 6: -5.0}
    _, queue, (dated,) = queue_of(6, rules=rules)
    preempted = make_request(5)
    queue.prepend_request(preempted)
    queue.begin_step(0.0)
    assert admit_all(queue) == [preempted, dated]


@pytest.mark.parametrize(
    ("gate", "urgency", "order"),
    [
        pytest.param(Gate.OPEN, -1.0, [1, 3, 0, 2], id="urgent requests go first"),
        pytest.param(Gate.LAST, 0.0, [0, 2, 1, 3], id="a lane with gate LAST comes after others"),
        pytest.param(Gate.LAST, -1.0, [0, 2, 1, 3], id="urgency does not precede gate LAST"),
    ],
)
def test_order_of_lanes(gate: Gate, urgency: float, order: list[int]) -> None:
    rules, queue, requests = queue_of(5, 20, 6, 30)
    rules.gates["long",], rules.urgency["long",] = gate, urgency
    assert admit_all(queue) == [requests[number] for number in order]


# Gates


def test_closed_lane_is_counted_but_not_offered() -> None:
    rules, queue, (long, short) = queue_of(20, 5)
    rules.gates["long",] = Gate.CLOSED
    assert admit_all(queue) == [short]
    assert len(queue) == 1
    assert not queue
    assert list(queue) == [long]
    with pytest.raises(IndexError):
        queue.peek_request()
    rules.gates["long",] = Gate.OPEN
    queue.begin_step(1.0)
    assert admit_all(queue) == [long]


def test_gate_is_asked_once_per_lane() -> None:
    rules, queue, requests = queue_of(*[20] * 1000, 5)
    rules.gates["long",] = Gate.CLOSED
    assert queue.peek_request() is requests[-1]
    assert len(rules.waits) == 2


# Waits


def test_request_put_back_in_the_same_step_keeps_its_wait() -> None:
    rules, queue, (request,) = queue_of(20)
    rules.now = 5.0
    queue.begin_step(5.0)
    queue.pop_request()
    queue.prepend_request(request)
    queue.begin_step(6.0)
    assert queue.lane_counts.by_policy[0]["long"].waited == 6.0


def test_preempted_head_keeps_the_wait_of_its_lane() -> None:
    rules, queue, _ = queue_of(50)
    rules.now = 30.0
    preempted = make_request(60)
    queue.prepend_request(preempted)
    rules.now = 40.0
    queue.begin_step(rules.now)
    assert queue.lane_counts.by_policy[0]["long"].waited == 40.0
    assert queue.pop_request() is preempted
    assert rules.waits == [40.0]
    # Its own wait is recorded.
    queue.end_step()
    assert queue.admitted_last_step[preempted].entry.since == 30.0


# Requests that change their lane


def test_few_of_many_requests_with_a_new_lane_move_per_step() -> None:
    rules, queue, requests = queue_of(*[20] * 1000)
    rules.gates["long",] = Gate.CLOSED
    queue.begin_step(1.0)
    assert not queue
    rules.limit = 30  # their prefix is cached
    queue.begin_step(2.0)
    assert queue.peek_request() is requests[0]
    assert queue.lane_counts.by_policy[0]["short"].requests <= 32
    # Each is still judged by its new lane.
    assert admit_all(queue) == requests
    assert not len(queue)
    queue.end_step()
    assert {place.lane_key for place in queue.admitted_last_step.values()} == {("short",)}


@pytest.mark.parametrize(
    ("evicted", "read", "steps"),
    [(100, 0, [0]), (1000, 0, [3]), (100, 10_000, range(2, 6))],
    ids=["few", "many", "most prefixes were read"],
)
def test_held_requests_with_a_new_lane_are_put_aside(
    evicted: int, read: int, steps: list[int]
) -> None:
    rules, queue, requests = queue_of(*[8] * evicted, 5)
    rules.read = read
    rules.limit = 6
    rules.gates["long",] = Gate.CLOSED
    count = 0
    queue.begin_step(0.0)
    while not queue:
        count += 1
        queue.begin_step(float(count))
    assert count in steps
    assert queue.pop_request() is requests[-1]
    rules.gates["long",] = Gate.OPEN
    assert admit_all(queue) == requests[:-1]


# Counts and state


def test_counts_follow_every_change() -> None:
    _, queue, requests = queue_of(5, 6, 20, 30)
    counts = queue.lane_counts.by_policy[0]
    assert (counts["short"].requests, counts["short"].tokens) == (2, 11)
    assert (counts["long"].requests, counts["long"].tokens) == (2, 50)
    queue.remove_requests([requests[3], make_request(7)])
    queue.pop_request()
    assert (counts["short"].requests, counts["short"].tokens) == (1, 6)
    assert (counts["long"].requests, counts["long"].tokens) == (1, 20)


def test_removed_requests_leave_no_state() -> None:
    _, queue, requests = queue_of(*[20] * 1000)
    for request in requests[:-1]:
        queue.remove_requests([request])
    entries = [
        entry for lanes in queue._heaps.lanes.values() for heap in lanes.values() for entry in heap
    ]
    assert len(entries) < 200
    assert admit_all(queue) == requests[-1:]
    with pytest.raises(ValueError, match="is not waiting"):
        queue.remove_request(requests[0])


@pytest.mark.parametrize("stopped", [False, True], ids=["refused", "stopped by a policy"])
def test_refused_request_is_remembered_until_it_enters(stopped: bool) -> None:
    _, queue, (request,) = queue_of(5)
    queue.begin_step(0.0)
    queue.peek_request()
    if stopped:
        queue.stop_scan()
    for now in (1.0, 2.0):
        queue.end_step()
        assert queue.kv_blocked is (None if stopped else request)
        queue.begin_step(now)
    queue.pop_request()
    assert queue.kv_blocked is None


@pytest.mark.parametrize("by_priority", [False, True])
def test_request_without_tokens_ends_the_scan_and_keeps_its_place(by_priority: bool) -> None:
    """VLLM 0.33 pops such a request and asks for the next one."""
    rules, queue, requests = queue_of(5, 20, 30, 6, by_priority=by_priority)
    rules.urgency["long",] = -1.0
    queue.begin_step(1.0)
    queue.kv_blocked = requests[1]
    rules.now = 3.0
    assert queue.peek_request() is requests[1]
    queue.stop_scan()
    assert queue.pop_request() is requests[1]
    assert not queue
    queue.prepend_requests([requests[1]])
    assert not queue
    queue.end_step()
    assert queue.kv_blocked is requests[1]
    assert queue.may_begin(requests[1])
    assert not queue.admitted_last_step
    assert list(queue) == requests
    queue.begin_step(4.0)
    assert [queue.lane_counts.by_policy[0][lane].waited for lane in ("short", "long")] == [4.0, 4.0]
    assert admit_all(queue) == [requests[1], requests[2], requests[0], requests[3]]


def test_held_request_counts_for_all_policies_except_the_holding_one() -> None:
    _, queue, _ = queue_of(5, 20, 30, rules=OfTwoPolicies())

    def held() -> tuple[int, int, int]:
        first, second = queue.lane_counts.by_policy
        return first["short"].num_held, first["long"].num_held, second[""].num_held

    queue.lane_counts.record_gate(("long", ""), 0)
    queue.begin_step(1.0)
    assert held() == (0, 0, 2)
    queue.lane_counts.record_gate(("long", ""), 1)
    queue.lane_counts.record_gate(("short", ""), 0)
    queue.recount_held()
    assert held() == (0, 2, 1)
    queue.lane_counts.record_gate(("short", ""), None)
    queue.begin_step(2.0)
    assert held() == (0, 2, 0)
    assert queue.lane_counts.by_policy[0]["long"].num_admissible == 0
    queue.begin_step(3.0)  # no gate was asked
    assert held() == (0, 0, 0)


def test_blocked_request_does_not_count_as_admissible() -> None:
    _, queue, (away, _) = queue_of(5, 6)
    queue.begin_step(0.0)
    assert queue.pop_request() is away
    queue.prepend_request(away)
    queue.end_step()
    queue.begin_step(1.0)
    count = queue.lane_counts.by_policy[0]["short"]
    assert (count.requests, count.num_barred, count.num_admissible) == (2, 1, 1)
    # It can begin, but a policy gave it no tokens.
    assert queue.peek_request() is away
    queue.stop_scan()
    queue.end_step()
    queue.begin_step(1.5)
    assert (count.requests, count.num_barred, count.num_admissible) == (2, 0, 2)
    assert queue.pop_request() is away
    queue.prepend_request(away)
    queue.end_step()
    # A blocked request held by a policy counts only as held.
    queue.lane_counts.record_gate(("short",), 1)
    queue.begin_step(2.0)
    assert (count.num_held, count.num_barred, count.num_admissible) == (2, 0, 0)
    for step in range(3, 12):
        queue.begin_step(float(step))
        queue.end_step()
    queue.begin_step(12.0)
    assert (count.num_barred, count.num_admissible) == (0, 2)


def test_skipped_requests_behind_a_closed_gate_take_no_turns_of_others() -> None:
    rules, queue, requests = queue_of(*[20] * 2 * MAX_RETRIES, *[5] * 2 * MAX_RETRIES)
    longs, shorts = requests[: 2 * MAX_RETRIES], requests[2 * MAX_RETRIES :]
    queue.begin_step(0.0)
    queue.prepend_requests(reversed(admit_all(queue)))
    queue.end_step()
    assert not queue
    rules.gates["long",] = Gate.CLOSED
    offered: list[Request] = []
    for number in range(3):
        queue.begin_step(number + 1.0)
        again = admit_all(queue)
        queue.prepend_requests(reversed(again))
        queue.end_step()
        offered += again
    assert offered == shorts
    rules.gates["long",] = Gate.OPEN
    queue.begin_step(4.0)
    assert admit_all(queue) == longs[:MAX_RETRIES] + shorts[:MAX_RETRIES]

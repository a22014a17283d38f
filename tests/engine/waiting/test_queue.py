"""The waiting queue of lanes, against upstream's queue and by its own rules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.request import Request

from tests.engine.schedulers import make_request
from vllm_sched.engine.waiting.held import LaneKey
from vllm_sched.engine.waiting.queue import MAX_RETRIES, LaneQueue
from vllm_sched.policies.types import Gate


class FakeRules:
    """Rules with lanes by prompt length, and gates that the test sets."""

    def __init__(self) -> None:
        self.gates = {("short",): Gate.OPEN, ("long",): Gate.OPEN}
        self.urgency = {("short",): 0.0, ("long",): 0.0}
        self.calls = 0
        self.now = 0.0
        self.limit = 10
        self.read = 0
        self.has_deadlines = True
        self.left_s: dict[str, float] = {}

    def lanes_of(self, request: Request) -> LaneKey:
        return ("long" if request.num_tokens > self.limit else "short",)

    def gate_of(self, lane: LaneKey, _: Request, waited: float) -> Gate:
        self.calls += 1
        assert 0 <= waited <= 50  # no test waits longer
        return self.gates[lane]

    def urgency_of(self, lane: LaneKey, *_: Any) -> tuple[float, ...]:
        return (self.urgency[lane],)

    def due(self, request: Request, since: float) -> float:
        return since + self.left_s.get(request.request_id, 0.0)

    def closed_adapter(self, _: Request) -> int:
        return 0

    def open_adapters(self) -> None:
        return None

    def compiles_grammar(self, _: Request) -> bool:
        return False

    def blocks_read(self) -> int:
        return self.read

    def queue(self, *, by_priority: bool = False, num_policies: int = 1) -> LaneQueue:
        return LaneQueue(
            self, by_priority=by_priority, clock=lambda: self.now, num_policies=num_policies
        )


def test_earliest_due_request_of_a_lane_enters_first() -> None:
    rules = FakeRules()
    queue = rules.queue()
    first, second, dated = (make_request(5, name=name) for name in "abc")
    rules.left_s = {"a": 30.0, "b": 30.0, "c": 10.0}
    for request in (first, second, dated):
        queue.add_request(request)
    queue.begin_step(0.0)
    assert admit_all(queue) == [dated, first, second]


def test_front_that_is_late_lets_others_pass() -> None:
    rules = FakeRules()
    queue = rules.queue()
    late, timely = make_request(5, name="late"), make_request(5, name="timely")
    rules.left_s = {"late": 1.0, "timely": 5.0}
    for request in (late, timely):
        queue.add_request(request)
    rules.left_s["late"] = 30.0
    rules.now = 2.0
    queue.begin_step(2.0)
    queue.remove_request(timely)
    queue.add_request(timely)
    assert admit_all(queue) == [timely, late]
    assert not len(queue)


def test_preempted_request_enters_before_an_earlier_deadline() -> None:
    rules = FakeRules()
    queue = rules.queue()
    preempted, dated = make_request(5, name="p"), make_request(5, name="d")
    rules.left_s = {"p": 30.0, "d": -5.0}
    queue.add_request(dated)
    queue.prepend_request(preempted)
    queue.begin_step(0.0)
    assert admit_all(queue) == [preempted, dated]


def admit_all(queue: Any) -> list[Request]:
    """Peek and pop until no request may enter."""
    out = []
    while queue:
        offered = queue.peek_request()
        assert queue.pop_request() is offered
        out.append(offered)
    return out


@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_queue_with_open_gates_matches_upstreams(by_priority: bool, seed: int) -> None:
    rng = random.Random(seed)
    queue: Any = FakeRules().queue(by_priority=by_priority)
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


def test_closed_lane_is_counted_but_not_offered() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    long, short = make_request(20), make_request(5)
    queue.add_request(long)
    queue.add_request(short)
    doorman.gates["long",] = Gate.CLOSED
    assert admit_all(queue) == [short]
    assert len(queue) == 1
    assert not queue
    assert list(queue) == [long]
    with pytest.raises(IndexError):
        queue.peek_request()
    doorman.gates["long",] = Gate.OPEN
    queue.begin_step(1.0)
    assert admit_all(queue) == [long]


def test_lane_with_gate_last_comes_after_all_others() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    requests = [make_request(20), make_request(5), make_request(6)]
    for request in requests:
        queue.add_request(request)
    doorman.gates["long",] = Gate.LAST
    assert admit_all(queue) == [requests[1], requests[2], requests[0]]


def test_gate_is_asked_once_per_lane() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    for _ in range(10_000):
        queue.add_request(make_request(20))
    short = make_request(5)
    queue.add_request(short)
    doorman.gates["long",] = Gate.CLOSED
    doorman.calls = 0
    assert queue.peek_request() is short
    assert doorman.calls == 2  # once per lane


def test_peeked_request_is_popped() -> None:
    queue = FakeRules().queue(by_priority=True)
    first = make_request(5, priority=3)
    queue.add_request(first)
    assert queue.peek_request() is first
    assert queue.pop_request() is first


def test_request_put_back_in_the_same_step_keeps_its_wait() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    request = make_request(20)
    queue.add_request(request)
    doorman.now = 5.0
    queue.begin_step(5.0)
    queue.pop_request()
    queue.prepend_request(request)
    queue.begin_step(6.0)
    assert queue.counts[0]["long"].waited == 6.0


def test_preempted_head_keeps_the_wait_of_its_lane() -> None:
    waited: list[float] = []

    class Noting(FakeRules):
        def gate_of(self, lane: LaneKey, head: Request, waited_s: float) -> Gate:
            waited.append(waited_s)
            return super().gate_of(lane, head, waited_s)

    doorman = Noting()
    queue = doorman.queue()
    queue.add_request(make_request(50))
    doorman.now = 30.0
    preempted = make_request(60)
    queue.prepend_request(preempted)
    doorman.now = 40.0
    queue.begin_step(doorman.now)
    assert queue.counts[0]["long"].waited == 40.0
    assert queue.pop_request() is preempted
    assert waited == [40.0]
    # Its own wait is recorded.
    queue.end_step()
    assert queue.entered[preempted][0] == 30.0


def test_request_moves_to_its_new_lane_at_the_front() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    requests = [make_request(20), make_request(20), make_request(5)]
    for request in requests:
        queue.add_request(request)
    doorman.gates["long",] = Gate.CLOSED
    doorman.limit = 30
    assert admit_all(queue) == requests
    assert queue.counts[0]["long"].requests == 0


def test_pop_is_correct_after_a_request_moves_lanes() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    evicted, long, short = make_request(8), make_request(20), make_request(5)
    for request in (evicted, long, short):
        queue.add_request(request)
    doorman.limit = 6  # the first request becomes long
    doorman.gates["long",] = Gate.CLOSED
    assert admit_all(queue) == [short]
    doorman.gates["long",] = Gate.OPEN
    queue.begin_step(1.0)
    assert admit_all(queue) == [evicted, long]
    assert not len(queue)


def test_few_of_many_requests_with_a_new_lane_move_per_step() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    requests = [make_request(20, hashed=False) for _ in range(1000)]
    for request in requests:
        queue.add_request(request)
    doorman.gates["long",] = Gate.CLOSED
    queue.begin_step(1.0)
    assert not queue
    doorman.limit = 30  # their prefix is cached
    queue.begin_step(2.0)
    assert queue.peek_request() is requests[0]
    assert queue.counts[0]["short"].requests <= 32
    # Each is still judged by its new lane.
    assert admit_all(queue)[:500] == requests[:500]
    assert not len(queue)


def after_an_eviction(doorman: FakeRules, evicted: int) -> tuple[LaneQueue, list[Request]]:
    """Return a queue with `evicted` requests that become long, and a short one behind them."""
    doorman.now = 100.0
    queue = doorman.queue()
    requests = [make_request(8, hashed=False) for _ in range(evicted)]
    for request in (*requests, make_request(5, hashed=False)):
        queue.add_request(request)
    doorman.limit = 6
    doorman.gates["long",] = Gate.CLOSED
    return queue, requests


def steps_until_entry(queue: LaneQueue, max_steps: int) -> int:
    """Return the number of steps without an offered request."""
    for steps in range(max_steps):
        queue.begin_step(100.0 + steps)
        if queue:
            return steps
    raise AssertionError(f"no request may enter in {max_steps} steps")


@pytest.mark.parametrize(("evicted", "steps"), [(100, 0), (1000, 3)])
def test_many_held_requests_are_put_aside_per_step(evicted: int, steps: int) -> None:
    doorman = FakeRules()
    queue, requests = after_an_eviction(doorman, evicted)
    assert steps_until_entry(queue, max_steps=10) == steps
    assert queue.pop_request().num_tokens == 5
    doorman.gates["long",] = Gate.OPEN
    assert admit_all(queue) == requests


def test_request_before_its_move_is_held_by_its_new_lane() -> None:
    doorman = FakeRules()
    doorman.read = 10_000  # most of their prefixes was read in the lookup
    queue, requests = after_an_eviction(doorman, 100)
    assert 1 < steps_until_entry(queue, max_steps=10) < 6
    assert queue.pop_request().num_tokens == 5
    doorman.gates["long",] = Gate.OPEN
    assert admit_all(queue) == requests


def test_request_before_its_move_enters_from_its_new_lane() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    requests = [make_request(20, hashed=False) for _ in range(100)]
    for request in requests:
        queue.add_request(request)
    doorman.limit = 30  # their prefix is cached
    queue.begin_step(1.0)
    assert admit_all(queue) == requests
    queue.end_step()
    assert {lane for _, lane in queue.entered.values()} == {("short",)}


def test_counts_follow_every_change() -> None:
    queue = FakeRules().queue()
    requests = [make_request(n) for n in (5, 6, 20, 30)]
    for request in requests:
        queue.add_request(request)
    assert (queue.counts[0]["short"].requests, queue.counts[0]["short"].tokens) == (2, 11)
    assert (queue.counts[0]["long"].requests, queue.counts[0]["long"].tokens) == (2, 50)
    queue.remove_requests([requests[3], make_request(7)])
    queue.pop_request()
    assert (queue.counts[0]["short"].requests, queue.counts[0]["short"].tokens) == (1, 6)
    assert (queue.counts[0]["long"].requests, queue.counts[0]["long"].tokens) == (1, 20)


def test_removed_requests_leave_no_state() -> None:
    queue = FakeRules().queue()
    requests = [make_request(20) for _ in range(1000)]
    for request in requests:
        queue.add_request(request)
    for request in requests[:-1]:
        queue.remove_requests([request])
    assert sum(map(len, queue._heaps.values())) < 200
    assert admit_all(queue) == requests[-1:]
    with pytest.raises(ValueError, match="is not waiting"):
        queue.remove_request(requests[0])


def test_refused_request_is_remembered_until_it_enters() -> None:
    queue = FakeRules().queue()
    request = make_request(5)
    queue.add_request(request)
    queue.begin_step(0.0)
    queue.peek_request()
    queue.end_step()
    assert queue.refused is request
    queue.begin_step(1.0)
    queue.end_step()
    assert queue.refused is request
    queue.pop_request()
    assert queue.refused is None


def test_request_stopped_by_a_policy_is_not_refused() -> None:
    queue = FakeRules().queue()
    queue.add_request(make_request(5))
    queue.begin_step(0.0)
    queue.peek_request()
    queue.end_offers()
    queue.end_step()
    assert queue.refused is None


@pytest.mark.parametrize("by_priority", [False, True])
def test_request_without_tokens_ends_the_scan_and_keeps_its_place(by_priority: bool) -> None:
    """VLLM 0.33 pops such a request and asks for the next one."""
    doorman = FakeRules()
    queue = doorman.queue(by_priority=by_priority)
    requests = [make_request(n) for n in (5, 20, 30, 6)]
    for request in requests:
        queue.add_request(request)
    doorman.urgency["long",] = -1.0
    queue.begin_step(1.0)
    queue.refused = requests[1]
    doorman.now = 3.0
    assert queue.peek_request() is requests[1]
    queue.end_offers()
    assert queue.pop_request() is requests[1]
    assert not queue
    queue.prepend_requests([requests[1]])
    assert not queue
    queue.end_step()
    assert queue.refused is requests[1]
    assert queue.may_begin(requests[1])
    assert not queue.entered
    assert list(queue) == requests
    queue.begin_step(4.0)
    assert [queue.counts[0][lane].waited for lane in ("short", "long")] == [4.0, 4.0]
    assert admit_all(queue) == [requests[1], requests[2], requests[0], requests[3]]


def test_held_request_counts_for_all_policies_except_the_holding_one() -> None:
    class OfTwoPolicies(FakeRules):
        def lanes_of(self, request: Request) -> LaneKey:
            return (*super().lanes_of(request), "")

        def gate_of(self, lane: LaneKey, head: Request, waited: float) -> Gate:
            return super().gate_of(lane[:1], head, waited)

        def urgency_of(self, lane: LaneKey, *_: Any) -> tuple[float, ...]:
            return super().urgency_of(lane[:1])

    doorman = OfTwoPolicies()
    queue = doorman.queue(num_policies=2)
    for tokens in (5, 20, 30):
        queue.add_request(make_request(tokens))

    def held() -> tuple[int, int, int]:
        first, second = queue.counts
        return first["short"].held, first["long"].held, second[""].held

    queue.held(("long", ""), 0)
    queue.begin_step(1.0)
    assert held() == (0, 0, 2)
    queue.held(("long", ""), 1)
    queue.held(("short", ""), 0)
    queue.ask_gates()
    assert held() == (0, 2, 1)
    queue.held(("short", ""), None)
    queue.begin_step(2.0)
    assert held() == (0, 2, 0)
    assert queue.counts[0]["long"].asking == 0
    queue.begin_step(3.0)  # no gate was asked
    assert held() == (0, 0, 0)


def test_blocked_request_does_not_count_as_asking() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    away, other = make_request(5), make_request(6)
    queue.add_request(away)
    queue.add_request(other)
    queue.begin_step(0.0)
    assert queue.pop_request() is away
    queue.prepend_request(away)
    queue.end_step()
    queue.begin_step(1.0)
    count = queue.counts[0]["short"]
    assert (count.requests, count.barred, count.asking) == (2, 1, 1)
    # It can begin, but a policy gave it no tokens.
    assert queue.peek_request() is away
    queue.end_offers()
    queue.end_step()
    queue.begin_step(1.5)
    assert (count.requests, count.barred, count.asking) == (2, 0, 2)
    assert queue.pop_request() is away
    queue.prepend_request(away)
    queue.end_step()
    # A blocked request held by a policy counts only as held.
    queue.held(("short",), 1)
    queue.begin_step(2.0)
    assert (count.held, count.barred, count.asking) == (2, 0, 0)
    for step in range(3, 12):
        queue.begin_step(float(step))
        queue.end_step()
    queue.begin_step(12.0)
    assert (count.barred, count.asking) == (0, 2)


def test_skipped_requests_behind_a_closed_gate_take_no_turns_of_others() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    longs = [make_request(20, hashed=False) for _ in range(2 * MAX_RETRIES)]
    shorts = [make_request(5, hashed=False) for _ in range(2 * MAX_RETRIES)]
    for request in longs + shorts:
        queue.add_request(request)
    queue.begin_step(0.0)
    queue.prepend_requests(reversed(admit_all(queue)))
    queue.end_step()
    assert not queue
    doorman.gates["long",] = Gate.CLOSED
    offered: list[Request] = []
    for number in range(3):
        queue.begin_step(number + 1.0)
        again = admit_all(queue)
        queue.prepend_requests(reversed(again))
        queue.end_step()
        offered += again
    assert offered == shorts
    doorman.gates["long",] = Gate.OPEN
    queue.begin_step(4.0)
    assert admit_all(queue) == longs[:MAX_RETRIES] + shorts[:MAX_RETRIES]


def test_urgent_requests_go_first() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    requests = [make_request(n) for n in (5, 20, 6, 30)]
    for request in requests:
        queue.add_request(request)
    doorman.urgency["long",] = -1.0
    assert admit_all(queue) == [requests[1], requests[3], requests[0], requests[2]]


def test_urgency_does_not_precede_gate_last() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    long, short = make_request(20), make_request(5)
    queue.add_request(long)
    queue.add_request(short)
    doorman.urgency["long",] = -1.0
    doorman.gates["long",] = Gate.LAST
    assert admit_all(queue) == [short, long]


def test_first_choice_keeps_no_request_on_offer() -> None:
    doorman = FakeRules()
    queue = doorman.queue()
    long = make_request(20)
    queue.add_request(long)
    assert queue.first_choice() is long
    doorman.gates["long",] = Gate.CLOSED
    assert not queue
    assert queue.first_choice() is None

"""The waiting queue of lanes, against upstream's and by its promises."""

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


class Doorman:
    """Lanes by the prompt's length, gates as the test sets them."""

    def __init__(self) -> None:
        self.gates = {("short",): Gate.OPEN, ("long",): Gate.OPEN}
        self.urgency = {("short",): 0.0, ("long",): 0.0}
        self.asked = 0
        self.now = 0.0
        self.limit = 10
        self.read = 0

    def lanes_of(self, request: Request) -> LaneKey:
        return ("long" if request.num_tokens > self.limit else "short",)

    def gate_of(self, lane: LaneKey, _: Request, waited: float) -> Gate:
        self.asked += 1
        assert waited >= 0
        return self.gates[lane]

    def urgency_of(self, lane: LaneKey, *_: Any) -> tuple[float, ...]:
        return (self.urgency[lane],)

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


def admit_all(queue: Any) -> list[Request]:
    """Peek and pop until nobody may enter."""
    out = []
    while queue:
        offered = queue.peek_request()
        assert queue.pop_request() is offered
        out.append(offered)
    return out


@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_with_open_gates_it_is_upstreams_queue(by_priority: bool, seed: int) -> None:
    rng = random.Random(seed)
    ours: Any = Doorman().queue(by_priority=by_priority)
    theirs: Any = PriorityRequestQueue() if by_priority else FCFSRequestQueue()
    for _ in range(300):
        action = rng.random()
        if action < 0.5:
            request = make_request(rng.choice([5, 20]), priority=rng.randrange(4))
            ours.add_request(request)
            theirs.add_request(request)
        elif action < 0.6 and theirs:
            gone = rng.sample(list(theirs), k=min(3, len(theirs)))
            ours.remove_requests(gone)
            theirs.remove_requests(gone)
        elif action < 0.75 and theirs:
            # The scan skips a few and puts them back, the way upstream does; the next step begins.
            number = min(len(theirs), 3)
            skipped = [theirs.pop_request() for _ in range(number)][::-1]
            assert [ours.pop_request() for _ in range(number)][::-1] == skipped
            ours.prepend_requests(skipped)
            theirs.prepend_requests(skipped)
            ours.end_step()
            ours.begin_step(0.0)
        elif theirs:
            assert ours.peek_request() is theirs.peek_request()
            assert ours.pop_request() is theirs.pop_request()
        assert len(ours) == len(theirs)
        assert list(ours) == list(theirs)
    assert admit_all(ours) == [theirs.pop_request() for _ in range(len(theirs))]


def test_a_closed_lane_is_counted_but_not_offered() -> None:
    doorman = Doorman()
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


def test_a_lane_that_is_last_comes_after_all_others() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    requests = [make_request(20), make_request(5), make_request(6)]
    for request in requests:
        queue.add_request(request)
    doorman.gates["long",] = Gate.LAST
    assert admit_all(queue) == [requests[1], requests[2], requests[0]]


def test_holding_ten_thousand_costs_no_more_than_holding_one() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    for _ in range(10_000):
        queue.add_request(make_request(20))
    short = make_request(5)
    queue.add_request(short)
    doorman.gates["long",] = Gate.CLOSED
    doorman.asked = 0
    assert queue.peek_request() is short
    assert doorman.asked == 2  # once a lane


def test_what_was_peeked_is_popped_whatever_arrives_between() -> None:
    queue = Doorman().queue(by_priority=True)
    first = make_request(5, priority=3)
    queue.add_request(first)
    assert queue.peek_request() is first
    assert queue.pop_request() is first


def test_one_popped_and_put_back_in_the_same_step_has_waited_all_along() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    request = make_request(20)
    queue.add_request(request)
    doorman.now = 5.0
    queue.begin_step(5.0)
    queue.pop_request()
    queue.prepend_request(request)
    queue.begin_step(6.0)
    assert queue.counts[0]["long"].waited == 6.0


def test_one_put_in_front_does_not_begin_the_wait_of_those_behind_anew() -> None:
    waited: list[float] = []

    class Noting(Doorman):
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
    # What is shown of it is its own wait.
    queue.end_step()
    assert queue.entered[preempted][0] == 30.0


def test_one_whose_lane_changed_moves_when_it_gets_to_the_front() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    requests = [make_request(20), make_request(20), make_request(5)]
    for request in requests:
        queue.add_request(request)
    doorman.gates["long",] = Gate.CLOSED
    doorman.limit = 30
    assert admit_all(queue) == requests
    assert queue.counts[0]["long"].requests == 0


def test_one_who_moves_to_the_front_of_another_lane_does_not_confuse_the_pop() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    evicted, long, short = make_request(8), make_request(20), make_request(5)
    for request in (evicted, long, short):
        queue.add_request(request)
    doorman.limit = 6  # the first, in the short lane, turns out to be long
    doorman.gates["long",] = Gate.CLOSED
    assert admit_all(queue) == [short]
    doorman.gates["long",] = Gate.OPEN
    queue.begin_step(1.0)
    assert admit_all(queue) == [evicted, long]
    assert not len(queue)


def test_of_thousands_whose_lane_changed_at_once_a_few_move_in_a_step() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    requests = [make_request(20, hashed=False) for _ in range(1000)]
    for request in requests:
        queue.add_request(request)
    doorman.gates["long",] = Gate.CLOSED
    queue.begin_step(1.0)
    assert not queue
    doorman.limit = 30  # what they begin with is cached
    queue.begin_step(2.0)
    assert queue.peek_request() is requests[0]
    assert queue.counts[0]["short"].requests <= 32
    # All the same each is judged by where it belongs.
    assert admit_all(queue)[:500] == requests[:500]
    assert not len(queue)


def after_an_eviction(doorman: Doorman, evicted: int) -> tuple[LaneQueue, list[Request]]:
    """Make a queue with so many, and a short one behind them, who turn out to be long."""
    queue = doorman.queue()
    requests = [make_request(8, hashed=False) for _ in range(evicted)]
    for request in (*requests, make_request(5, hashed=False)):
        queue.add_request(request)
    doorman.limit = 6
    doorman.gates["long",] = Gate.CLOSED
    return queue, requests


def steps_until_somebody_enters(queue: LaneQueue, most: int) -> int:
    """Count the steps that find nobody to offer."""
    for steps in range(most):
        queue.begin_step(float(steps + 1))
        if queue:
            return steps
    raise AssertionError(f"nobody may enter in {most} steps")


@pytest.mark.parametrize(("evicted", "steps"), [(100, 0), (1000, 3)])
def test_those_who_may_not_enter_are_put_aside_many_in_a_step(evicted: int, steps: int) -> None:
    doorman = Doorman()
    queue, requests = after_an_eviction(doorman, evicted)
    assert steps_until_somebody_enters(queue, most=10) == steps
    assert queue.pop_request().num_tokens == 5
    doorman.gates["long",] = Gate.OPEN
    assert admit_all(queue) == requests


def test_one_who_has_yet_to_move_is_held_where_it_belongs() -> None:
    doorman = Doorman()
    doorman.read = 10_000  # the most of their prefixes is still there, and was read through
    queue, requests = after_an_eviction(doorman, 100)
    assert 1 < steps_until_somebody_enters(queue, most=10) < 6
    assert queue.pop_request().num_tokens == 5
    doorman.gates["long",] = Gate.OPEN
    assert admit_all(queue) == requests


def test_one_who_has_yet_to_move_enters_from_where_it_belongs() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    requests = [make_request(20, hashed=False) for _ in range(100)]
    for request in requests:
        queue.add_request(request)
    doorman.limit = 30  # what they begin with is cached
    queue.begin_step(1.0)
    assert admit_all(queue) == requests
    queue.end_step()
    assert {lane for _, lane in queue.entered.values()} == {("short",)}


def test_counts_follow_every_change() -> None:
    queue = Doorman().queue()
    requests = [make_request(n) for n in (5, 6, 20, 30)]
    for request in requests:
        queue.add_request(request)
    assert (queue.counts[0]["short"].requests, queue.counts[0]["short"].tokens) == (2, 11)
    assert (queue.counts[0]["long"].requests, queue.counts[0]["long"].tokens) == (2, 50)
    queue.remove_requests([requests[3], make_request(7)])
    queue.pop_request()
    assert (queue.counts[0]["short"].requests, queue.counts[0]["short"].tokens) == (1, 6)
    assert (queue.counts[0]["long"].requests, queue.counts[0]["long"].tokens) == (1, 20)


def test_removed_ones_leave_no_trace() -> None:
    queue = Doorman().queue()
    requests = [make_request(20) for _ in range(1000)]
    for request in requests:
        queue.add_request(request)
    for request in requests[:-1]:
        queue.remove_requests([request])
    assert sum(map(len, queue._heaps.values())) < 200
    assert admit_all(queue) == requests[-1:]
    with pytest.raises(ValueError, match="is not waiting"):
        queue.remove_request(requests[0])


def test_one_offered_but_not_taken_is_remembered_until_it_is() -> None:
    queue = Doorman().queue()
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


def test_one_turned_away_by_a_policy_was_not_refused_for_room() -> None:
    queue = Doorman().queue()
    queue.add_request(make_request(5))
    queue.begin_step(0.0)
    queue.peek_request()
    queue.end_offers()
    queue.end_step()
    assert queue.refused is None


@pytest.mark.parametrize("by_priority", [False, True])
def test_a_request_without_tokens_ends_the_scan_and_keeps_its_place(by_priority: bool) -> None:
    """As vLLM 0.33 does it, which pops the request and asks for the next."""
    doorman = Doorman()
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
    assert queue.could_begin(requests[1])
    assert not queue.entered
    assert list(queue) == requests
    queue.begin_step(4.0)
    assert [queue.counts[0][lane].waited for lane in ("short", "long")] == [4.0, 4.0]
    assert admit_all(queue) == [requests[1], requests[2], requests[0], requests[3]]


def test_who_is_held_is_counted_for_all_policies_but_the_one_that_holds() -> None:
    class OfTwoPolicies(Doorman):
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
    queue.begin_step(3.0)  # nobody was asked
    assert held() == (0, 0, 0)


def test_who_was_turned_away_asks_nobody_to_be_let_in() -> None:
    doorman = Doorman()
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
    # It could begin, had a policy given it anything.
    assert queue.peek_request() is away
    queue.end_offers()
    queue.end_step()
    queue.begin_step(1.5)
    assert (count.requests, count.barred, count.asking) == (2, 0, 2)
    assert queue.pop_request() is away
    queue.prepend_request(away)
    queue.end_step()
    # Of who is held by another policy besides it is said once.
    queue.held(("short",), 1)
    queue.begin_step(2.0)
    assert (count.held, count.barred, count.asking) == (2, 0, 0)
    for step in range(3, 12):
        queue.begin_step(float(step))
        queue.end_step()
    queue.begin_step(12.0)
    assert (count.barred, count.asking) == (0, 2)


def test_skipped_requests_behind_a_closed_gate_take_no_other_lanes_turns() -> None:
    doorman = Doorman()
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


def test_the_urgent_go_first_whenever_they_came() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    requests = [make_request(n) for n in (5, 20, 6, 30)]
    for request in requests:
        queue.add_request(request)
    doorman.urgency["long",] = -1.0
    assert admit_all(queue) == [requests[1], requests[3], requests[0], requests[2]]


def test_urgency_does_not_make_the_last_of_open_lanes_first() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    long, short = make_request(20), make_request(5)
    queue.add_request(long)
    queue.add_request(short)
    doorman.urgency["long",] = -1.0
    doorman.gates["long",] = Gate.LAST
    assert admit_all(queue) == [short, long]


def test_asking_whether_somebody_may_enter_keeps_nobody_on_offer() -> None:
    doorman = Doorman()
    queue = doorman.queue()
    long = make_request(20)
    queue.add_request(long)
    assert queue.first_choice() is long
    doorman.gates["long",] = Gate.CLOSED
    assert not queue
    assert queue.first_choice() is None

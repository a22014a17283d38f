"""Storms on vLLM's real scheduler: mass aborts, preemptions, clock jumps and pauses.

Seeded, for each policy. After a storm all remaining requests finish and no state is left. A step
costs the same with a thousand waiting requests, and no wait exceeds a policy's bound.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import answer, make_request, make_scheduler
from vllm_sched import PolicyScheduler, SyncPolicyScheduler

MAX_WAIT = 5.0
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "long_prompt": {"long_prompt": {"max_num_partial_prefills": 4, "max_wait_s": MAX_WAIT}},
    "lanes": {"lanes": {"reserve_slots": 0.5, "batch_max_wait_s": MAX_WAIT}},
    "static_batching": {"static_batching": {"size": 4, "max_wait_s": MAX_WAIT}},
    "prefill_first": {"prefill_first": {"pause_decodes": True, "max_pause_s": 0.5}},
    "deferred_prefill": {"deferred_prefill": {"departures": 3}},
    "rotation": {"rotation": {"chunk": 16}},
    "chunk_budget": {"chunk_budget": {"itl_ms": 15.0}},
    "most": {
        "lanes": {"batch_max_wait_s": MAX_WAIT},
        "long_prompt": {"max_num_partial_prefills": 2, "max_wait_s": MAX_WAIT},
        "deferred_prefill": {"departures": "auto", "max_delay_ms": 500.0},
        "rotation": {},
        "chunk_budget": {"itl_ms": 100.0},
    },
}
TINY, ROOMY = 90, 10_000  # blocks of the cache
STEPS, CALM = 60, 20_000
JUMPS = (-1e9, -3600.0, -31.0, -0.5, 0.5, 31.0, 3600.0, 1e9)


class Engine:
    """A scheduler with its clock and requests; two steps in flight if asynchronous."""

    def __init__(self, policies: dict[str, dict[str, Any]], *, ahead: bool, **options: Any) -> None:
        self.now = 1000.0
        self.depth = 2 if ahead else 1
        self.scheduler: Any = make_scheduler(
            policies,
            scheduler_cls=PolicyScheduler if ahead else SyncPolicyScheduler,
            async_scheduling=ahead,
            **options,
        )
        self.scheduler.clock = lambda: self.now
        self.scheduler.waiting._clock = lambda: self.now
        self.alive: dict[str, Any] = {}
        self.in_flight: deque[Any] = deque()
        self.begun: dict[str, float] = {}  # time of the first step of each

    def add(self, tokens: int, output: int = 4, priority: int = 0) -> str:
        """Add a request; return its name."""
        request = make_request(tokens, output=output, priority=priority, hashed=False)
        self.scheduler.add_request(request)
        self.alive[request.request_id] = request
        return str(request.request_id)

    def abort(self, names: list[str]) -> None:
        """Abort requests."""
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        for name in names:
            self.alive.pop(name, None)

    def step(self, seconds: float = 0.02) -> int:
        """Schedule a step, and process due results; return the scheduled tokens."""
        output = self.scheduler.schedule()
        for name in output.num_scheduled_tokens:
            self.begun.setdefault(name, self.now)
        self.in_flight.append((output, answer(self.scheduler, output)))
        self.now += seconds
        while len(self.in_flight) >= self.depth:
            self.process_result()
        return int(output.total_num_scheduled_tokens)

    def process_result(self) -> None:
        """Process the oldest step's result."""
        self.scheduler.update_from_output(*self.in_flight.popleft())
        for name in [n for n, r in self.alive.items() if r.is_finished()]:
            del self.alive[name]

    def run_to_end(self, max_steps: int = CALM) -> None:
        """Run until all requests are done, and check that no state is left."""
        for _ in range(max_steps):
            if not self.alive:
                break
            self.step()
        assert not self.alive, f"{len(self.alive)} never finish"
        while self.in_flight:
            self.process_result()
        scheduler = self.scheduler
        assert scheduler.get_request_counts() == (0, 0)
        assert scheduler.kv_cache_manager.usage == 0
        assert sum(lane.requests for lane in scheduler.waiting.counts[0].values()) == 0
        assert len(scheduler.waiting) == 0
        assert not scheduler.requests


def storm(engine: Engine, dice: random.Random, kind: str) -> None:
    """Run steps with random events of one kind."""
    for _ in range(STEPS):
        for _ in range(dice.choice((0, 1, 1, 8))):
            tokens = dice.choice((5, 20, 60, 90, 300, 900))
            engine.add(tokens, dice.randrange(1, 30), dice.randrange(3))
        if kind == "aborts" and dice.random() < 0.3:
            names = sorted(engine.alive)
            engine.abort(dice.sample(names, int(len(names) * dice.choice((0.1, 0.5, 1.0)))))
        if kind == "preemptions" and dice.random() < 0.2:
            while engine.in_flight:
                engine.process_result()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if kind == "clock" and dice.random() < 0.3:
            engine.now += dice.choice(JUMPS)
        if kind == "pauses" and dice.random() < 0.3:
            engine.scheduler.set_pause_state(dice.choice(list(PauseState)))
        engine.step()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


@pytest.mark.parametrize(
    ("name", "ahead"),
    [*((name, False) for name in SETS), *((name, True) for name in ("long_prompt", "most"))],
)
def test_all_requests_finish_after_a_storm(name: str, ahead: bool) -> None:
    for number, kind in enumerate(("aborts", "preemptions", "clock", "pauses")):
        dice = random.Random(f"{name} {kind}")
        engine = Engine(SETS[name], ahead=ahead, num_blocks=TINY, max_num_seqs=16)
        storm(engine, dice, kind)
        # All are aborted after one storm, as when a worker stops.
        if number == 0:
            engine.abort(sorted(engine.alive))
        else:
            engine.abort(sorted(engine.alive)[: len(engine.alive) * 3 // 4])
        engine.run_to_end()


@pytest.mark.parametrize(
    "name", ["long_prompt", "lanes", "static_batching", "prefill_first", "most"]
)
def test_the_cost_of_a_step_does_not_grow_with_the_number_of_waiting_requests(name: str) -> None:
    def calls(waiting: int) -> int:
        """Return the Python calls of 30 steps with `waiting` requests and eight slots."""
        engine = Engine(SETS[name], ahead=False, num_blocks=ROOMY, max_num_seqs=8)
        for number in range(waiting):
            engine.add(900 if number % 10 == 0 else 20, 8, number % 3)
        for _ in range(10):
            engine.step()
        count = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        for _ in range(30):
            sys.setprofile(note)
            try:
                output = engine.scheduler.schedule()
            finally:
                sys.setprofile(before)
            engine.in_flight.append((output, answer(engine.scheduler, output)))
            engine.now += 0.02
            engine.process_result()
        # All requests can be aborted at once.
        engine.abort(sorted(engine.alive))
        engine.run_to_end(10)
        return count

    # The queue sorts by urgency at times: a factor, not a hundred of them.
    assert calls(1_500) < 3 * calls(100)


def waits(policies: dict[str, dict[str, Any]], *, many_longs: bool) -> list[float]:
    """Return all waits under a stream of shorts at a third of the capacity, with some longs."""
    engine = Engine(policies, ahead=False, num_blocks=ROOMY, max_num_seqs=16)
    arrived: dict[str, float] = {}
    for number in range(800):
        arrived[engine.add(20, 3)] = engine.now
        if many_longs and number % 200 == 0:
            arrived |= {engine.add(1900, 3): engine.now for _ in range(4)}
        elif not many_longs and number % 50 == 0:
            arrived |= {engine.add(500, 3, priority): engine.now for priority in (0, 1)}
        engine.step(0.05)
    engine.run_to_end()
    return sorted(engine.begun[one] - since for one, since in arrived.items())


def unbounded(policies: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the policies with unlimited waits."""
    return {
        name: {key: 1e9 if key.endswith("max_wait_s") else value for key, value in settings.items()}
        for name, settings in policies.items()
    }


@pytest.mark.parametrize("name", ["long_prompt", "lanes", "static_batching", "most"])
def test_wait_never_exceeds_the_bound(name: str) -> None:
    bounds = MAX_WAIT * len({"lanes", "long_prompt", "static_batching"} & {*SETS[name]})
    many_longs = name == "long_prompt"
    found = waits(SETS[name], many_longs=many_longs)
    assert found[-1] <= bounds + 1.0
    if name != "static_batching":  # all requests wait for a batch
        assert found[len(found) // 2] < 0.5
    # Without the bound, waits are longer.
    assert waits(unbounded(SETS[name]), many_longs=many_longs)[-1] > bounds + 2.0


def test_clock_that_stops_or_goes_back_holds_no_request() -> None:
    """With nothing running, every gate is open."""
    for step_s in (0.0, -1.0):
        engine = Engine(SETS["most"], ahead=False, num_blocks=TINY, max_num_seqs=4)
        for number in range(60):
            engine.add(300 if number % 3 else 900, 5)
        for _ in range(5000):
            if not engine.alive:
                break
            engine.step(step_s)
        assert not engine.alive
        engine.run_to_end()

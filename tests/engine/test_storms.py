"""Storms on vLLM's real scheduler: mass aborts, preemptions, clock jumps and pauses.

Seeded, for each policy. After a storm all remaining requests finish and no state is left. A step
costs the same with a thousand waiting requests, and no wait exceeds a policy's bound.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput

from tests.policies.making import Bench

MAX_WAIT = 5.0
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "long_prompt": {"long_prompt": {"max_num_partial_prefills": 4, "max_wait_s": MAX_WAIT}},
    "lanes": {"lanes": {"reserve_slots": 0.5, "batch_max_wait_s": MAX_WAIT}},
    "static_batching": {"static_batching": {"size": 4, "max_wait_s": MAX_WAIT}},
    "prefill_first": {"prefill_first": {"max_pause_s": 0.5}},
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


class Engine(Bench):
    """A bench that names requests, and records when they begin."""

    def __init__(self, policies: dict[str, dict[str, Any]], *, ahead: bool, **engine: Any) -> None:
        super().__init__(policies, ahead=ahead, **engine)
        self.names = map(str, itertools.count())
        self.begun: dict[str, float] = {}  # time of the first step of each

    def new(self, tokens: int, output: int = 4, priority: int = 0) -> str:
        name = next(self.names)
        self.add(name, tokens, output=output, priority=priority, hashed=False)
        return name

    def scheduled(self, output: SchedulerOutput, seconds: float) -> float:
        for name in output.num_scheduled_tokens:
            self.begun.setdefault(name, self.now)
        return seconds

    def run_to_end(self, max_steps: int = CALM) -> None:
        """Run until all requests are done, and check that no state is left."""
        self.drain(max_steps)
        scheduler = self.scheduler
        assert scheduler.get_request_counts() == (0, 0)
        assert scheduler.kv_cache_manager.usage == 0
        lanes = scheduler.waiting.lane_counts.by_policy[0].values()
        assert sum(lane.requests for lane in lanes) == 0
        assert len(scheduler.waiting) == 0
        assert not scheduler.requests


def storm(engine: Engine, dice: random.Random, kind: str) -> None:
    """Run steps with random events of one kind."""
    for _ in range(STEPS):
        for _ in range(dice.choice((0, 1, 1, 8))):
            tokens = dice.choice((5, 20, 60, 75, 90, 300, 900))
            engine.new(tokens, dice.randrange(1, 30), dice.randrange(3))
        if kind == "aborts" and dice.random() < 0.3:
            names = sorted(engine.scheduler.requests)
            engine.abort(*dice.sample(names, int(len(names) * dice.choice((0.1, 0.5, 1.0)))))
        if kind == "preemptions" and dice.random() < 0.2:
            while engine.in_flight:
                engine.finish()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if kind == "clock" and dice.random() < 0.3:
            engine.now += dice.choice(JUMPS)
        if kind == "pauses" and dice.random() < 0.3:
            engine.scheduler.set_pause_state(dice.choice(list(PauseState)))
        engine.step(0.02)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


@pytest.mark.parametrize(
    ("name", "ahead"),
    [*((name, False) for name in SETS), *((name, True) for name in ("long_prompt", "most"))],
)
def test_all_requests_finish_after_a_storm(name: str, ahead: bool) -> None:
    for kind in ("aborts", "preemptions", "clock", "pauses"):
        dice = random.Random(f"{name} {kind}")
        engine = Engine(SETS[name], ahead=ahead, num_blocks=TINY, max_num_seqs=16)
        storm(engine, dice, kind)
        # All are aborted after one storm, as when a worker stops.
        names = sorted(engine.scheduler.requests)
        engine.abort(*(names if kind == "aborts" else names[: len(names) * 3 // 4]))
        engine.run_to_end()


@pytest.mark.parametrize(
    "name", ["long_prompt", "lanes", "static_batching", "prefill_first", "most"]
)
def test_the_cost_of_a_step_does_not_grow_with_the_number_of_waiting_requests(name: str) -> None:
    def calls(waiting: int) -> int:
        """Return the Python calls of 30 steps with `waiting` requests and eight slots."""
        engine = Engine(SETS[name], ahead=False, num_blocks=ROOMY, max_num_seqs=8)
        for number in range(waiting):
            engine.new(900 if number % 10 == 0 else 20, 8, number % 3)
        engine.steps(10)
        count, schedule = 0, engine.scheduler.schedule

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event == "call"

        def counted() -> Any:
            before = sys.getprofile()
            sys.setprofile(note)
            try:
                return schedule()
            finally:
                sys.setprofile(before)

        engine.scheduler.schedule = counted
        engine.steps(30)
        # All requests can be aborted at once.
        engine.abort(*engine.scheduler.requests)
        engine.run_to_end(10)
        return count

    # The queue sorts by urgency at times: a factor, not a hundred of them.
    assert calls(1_500) < 3 * calls(100)


def waits(policies: dict[str, dict[str, Any]], *, many_longs: bool) -> list[float]:
    """Return all waits under a stream of shorts at a third of the capacity, with some longs."""
    engine = Engine(policies, ahead=False, num_blocks=ROOMY, max_num_seqs=16)
    arrived: dict[str, float] = {}
    for number in range(800):
        arrived[engine.new(20, 3)] = engine.now
        if many_longs and number % 200 == 0:
            arrived |= {engine.new(1900, 3): engine.now for _ in range(4)}
        elif not many_longs and number % 50 == 0:
            arrived |= {engine.new(500, 3, priority): engine.now for priority in (0, 1)}
        engine.step(0.05)
    engine.run_to_end()
    return sorted(engine.begun[one] - since for one, since in arrived.items())


@pytest.mark.parametrize("name", ["long_prompt", "lanes", "static_batching", "most"])
def test_wait_never_exceeds_the_bound(name: str) -> None:
    policies = SETS[name]
    bounds = MAX_WAIT * len({"lanes", "long_prompt", "static_batching"} & {*policies})
    many_longs = name == "long_prompt"
    found = waits(policies, many_longs=many_longs)
    assert found[-1] <= bounds + 1.0
    if name != "static_batching":  # all requests wait for a batch
        assert found[len(found) // 2] < 0.5
    # Without the bound, waits are longer.
    unbounded = {
        name: {key: 1e9 if key.endswith("max_wait_s") else value for key, value in settings.items()}
        for name, settings in policies.items()
    }
    assert waits(unbounded, many_longs=many_longs)[-1] > bounds + 2.0


@pytest.mark.parametrize("step_s", [0.0, -1.0])
def test_clock_that_stops_or_goes_back_holds_no_request(step_s: float) -> None:
    """With nothing running, every gate is open."""
    engine = Engine(SETS["most"], ahead=False, num_blocks=TINY, max_num_seqs=4)
    for number in range(60):
        engine.new(300 if number % 3 else 900, 5)
    for _ in range(5000):
        if engine.scheduler.has_unfinished_requests():
            engine.step(step_s)
    engine.run_to_end(1)

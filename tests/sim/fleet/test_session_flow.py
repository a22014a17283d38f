"""Sessions in virtual time: a turn waits for the last answer, and for sub-agents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.making import ListedSessions, fleet_of
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Session, Turn
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.fleet import PlayedFleet, SimulatedFleet

SYSTEM = ("system", 512)
ENGINES = [ExactEngine, FluidEngine]


def play(
    *sessions: Session, engine: Any = FluidEngine, timeout_s: float = 600.0, **settings: Any
) -> PlayedFleet:
    fleet = SimulatedFleet(*fleet_of({}, {}), engine, timeout_s=timeout_s)
    return fleet.play(Schedule(source=ListedSessions(*sessions), **settings))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_turn_is_sent_after_the_last_answer_and_the_think_time(engine: Any) -> None:
    turns = (Turn(1000, 64), Turn(256, 64, think_s=3.0), Turn(256, 64, think_s=1.0))
    played = play(Session("s", turns, (SYSTEM,)), engine=engine)
    first, second, third = played.outcomes
    assert second.at == pytest.approx(first.end + 3.0, abs=1e-6)
    assert third.at == pytest.approx(second.end + 1.0, abs=1e-6)
    assert [each.prompt_tokens for each in played.outcomes] == [1512, 1832, 2152]
    assert len({each.worker for each in played.outcomes}) == 1
    for each in played.outcomes[1:]:  # the last prompt and answer are cached
        assert each.cached_tokens == pytest.approx(each.context_tokens, abs=32)
    (task,) = played.sessions
    assert (task.done, task.turns, task.think_s) == (3, 3, 4.0)
    assert task.seconds == pytest.approx(third.end)


def test_the_parent_waits_for_its_sub_agents() -> None:
    forks = tuple(Session(f"s.{n}", (Turn(100, 8 * n), Turn(50, 8, n / 2))) for n in (1, 8))
    played = play(Session("s", (Turn(1000, 16, forks=forks), Turn(20, 4, 2.0)), (SYSTEM,)))
    parent, *children, last = sorted(played.outcomes, key=lambda each: each.at)
    assert {child.at for child in children[:2]} == {parent.end}
    assert last.at == pytest.approx(max(child.end for child in children) + 2.0)
    assert all(child.context_tokens >= 1528 for child in children)
    (task,) = played.sessions
    # The think time of the sub-agent that ended last, and of the next turn.
    assert (task.done, task.sub_agents, task.think_s) == (2, 2, 6.0)


def test_a_closed_loop_keeps_its_sessions() -> None:
    sessions = [Session(f"s{n}", (Turn(500, 8), Turn(100, 8, 2.0))) for n in range(6)]
    played = play(*sessions, concurrency=2)
    starts = sorted(task.at for task in played.sessions)
    ends = sorted(task.end or 0.0 for task in played.sessions)
    assert starts[:2] == [0.0, 0.0]
    assert starts[2:] == pytest.approx(ends[:4])


def test_no_turn_is_sent_after_the_duration() -> None:
    played = play(Session("s", tuple(Turn(50, 4, 1.0) for _ in range(50))), duration_s=10.0)
    (task,) = played.sessions
    assert 5 < task.done < 11
    assert task.seconds is None
    assert not task.failed
    assert max(each.at for each in played.outcomes) < 10
    # Virtual time ends with the duration.
    fleet = SimulatedFleet(*fleet_of({}, {}), FluidEngine)
    session = Session("s", (Turn(50, 4), Turn(50, 4, think_s=1e300)))
    played = fleet.play(Schedule(source=ListedSessions(session), duration_s=10.0))
    assert [task.done for task in played.sessions] == [1]
    assert fleet._queue.now == 10.0


def test_agent_coding_is_played_alike_for_a_seed() -> None:
    schedule = Schedule(source=find("agent-coding", sessions=True), count=3, rate=1.0, scale=0.02)
    first, again = (SimulatedFleet(*fleet_of({}, {}), FluidEngine).play(schedule) for _ in range(2))
    assert first.outcomes == again.outcomes
    assert all(task.seconds for task in first.sessions)


def test_a_failed_turn_ends_its_session() -> None:
    forks = (Session("s.1", (Turn(50, 4000), Turn(50, 4))),)
    played = play(Session("s", (Turn(50, 4, forks=forks), Turn(50, 4))), timeout_s=2.0)
    (task,) = played.sessions
    assert task.failed
    assert [bool(each.error) for each in played.outcomes] == [False, True]

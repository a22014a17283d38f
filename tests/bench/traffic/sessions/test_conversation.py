"""The requests of a session: each prompt extends the last prompt and answer."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.sessions.agent_coding import AgentCoding
from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn, first_request, plan_session
from vllm_sched.bench.traffic.types import Session, Turn
from vllm_sched.errors import UsageError

SYSTEM = ("system", 100)


def planned(*turns: Turn, limit: float = float("inf")) -> tuple[PlannedTurn, ...]:
    return plan_session(first_request(Session("s", turns, (SYSTEM,)), 0.0, "turn"), limit)


def sizes(turns: tuple[PlannedTurn, ...]) -> list[tuple[int, int, int]]:
    """Return each turn's prompt, known tokens and output."""
    return [
        (t.request.prompt_tokens, t.request.context_tokens, t.request.output_tokens) for t in turns
    ]


def test_a_prompt_is_the_last_prompt_and_answer_and_new_tokens() -> None:
    turns = planned(Turn(50, 10), Turn(7, 20, think_s=3.0))
    assert sizes(turns) == [(150, 0, 10), (167, 160, 20)]
    assert [t.request.shared for t in turns] == [(SYSTEM, ("s#0", 60)), (SYSTEM, ("s#0", 87))]
    assert [t.restarts for t in turns] == [True, False]
    assert turns[1].think_s == 3.0


def test_the_first_request_is_the_first_turn() -> None:
    begin = first_request(Session("s", (Turn(50, 10),), (SYSTEM,)), 2.0, "turn", "ann")
    (turn,) = plan_session(begin)
    for each in (begin, turn.request):
        assert (each.at, each.tenant, each.prompt_tokens, each.output_tokens) == (
            2.0,
            "ann",
            150,
            10,
        )


def test_a_fork_extends_the_prompt_and_answer_of_its_parent() -> None:
    fork = Session("s.1", (Turn(5, 2), Turn(3, 1)), (SYSTEM,))
    turns = planned(Turn(50, 10, forks=(fork,)), Turn(9, 4))
    (child,) = turns[0].forks
    assert sizes(child) == [(165, 160, 2), (170, 167, 1)]
    assert child[0].request.shared == (SYSTEM, ("s#0", 60), ("s.1#0", 7))
    assert sizes(turns)[1] == (169, 160, 4)


def test_a_fresh_sub_agent_has_only_its_own_prefix() -> None:
    fork = Session("s.1", (Turn(5, 2),), (SYSTEM,), fresh=True)
    (child,) = planned(Turn(50, 10, forks=(fork,)))[0].forks
    assert sizes(child) == [(105, 0, 2)]
    assert child[0].restarts


def test_compaction_keeps_the_shared_prefix_only() -> None:
    turns = planned(Turn(50, 10), Turn(30, 5, compacts=True), Turn(1, 1))
    assert sizes(turns) == [(150, 0, 10), (130, 100, 5), (136, 135, 1)]
    assert turns[1].request.shared == (SYSTEM, ("s#1", 35))


def test_what_exceeds_the_context_is_compacted() -> None:
    turns = planned(Turn(50, 10), Turn(60, 5), Turn(5_000, 900), limit=200)
    assert [t.cut for t in turns] == [False, True, True]
    assert all(t.request.prompt_tokens + t.request.output_tokens <= 200 for t in turns)
    assert sizes(turns)[1] == (160, 100, 5)
    # Also where the turn compacts anyway, and the shared prefix alone is too long.
    turns = planned(Turn(50, 10), Turn(6, 5, compacts=True), limit=80)
    assert sizes(turns) == [(70, 0, 10), (75, 0, 5)]


def test_lengths_are_scaled() -> None:
    begin = first_request(Session("s", (Turn(50, 10), Turn(20, 4)), (SYSTEM,)), 0.0, "turn")
    assert sizes(plan_session(begin.scaled(0.1))) == [(15, 0, 1), (18, 16, 1)]


def every(turns: tuple[PlannedTurn, ...]) -> list[PlannedTurn]:
    return [each for turn in turns for each in (turn, *(c for f in turn.forks for c in every(f)))]


def test_agent_coding_has_the_published_distributions() -> None:
    begun = islice(AgentCoding().requests(random.Random(1)), 400)
    turns = [turn.request for request in begun for turn in every(plan_session(request))]
    prompts = sorted(turn.prompt_tokens for turn in turns)
    assert prompts[len(prompts) // 2] == pytest.approx(195_000, rel=0.15)
    assert prompts[len(prompts) * 9 // 10] == pytest.approx(521_000, rel=0.15)
    reusing = sum(turn.context_tokens >= 0.9 * turn.prompt_tokens for turn in turns)
    assert reusing / len(turns) == pytest.approx(0.96, abs=0.01)
    assert len({turn.shared[1][0] for turn in turns}) > 50  # repositories


def test_agent_coding_is_the_same_for_a_seed() -> None:
    first, again = (list(islice(AgentCoding().requests(random.Random(7)), 3)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("workload", ["agent-coding", "agent-coding:0.5,azure-conv:0.5"])
def test_sessions_are_refused_where_they_are_not_played(workload: str) -> None:
    with pytest.raises(UsageError, match="sessions"):
        find(workload)

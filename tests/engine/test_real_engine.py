"""Every policy in a real engine returns the tokens of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.arrivals import ARRIVALS, SETS, seconds_of
from tests.engine.continued import INEXACT, PARAMETERS
from tests.engine.offloaded import FRESH, PROMPT, SESSIONS
from tests.engine.offloaded import SETS as OFFLOADED

pytestmark = pytest.mark.engine

Run = dict[str, Any]


@pytest.mark.parametrize("name", SETS)
def test_greedy_output_matches_the_default_scheduler(runs: dict[str, Run], name: str) -> None:
    assert None not in runs[name]["outputs"]
    assert runs[name]["outputs"] == runs["default"]["outputs"]
    assert runs[name]["usage"] == 0


def test_journal_has_the_tokens_that_the_engine_returns(
    journaled: dict[str, Any], runs: dict[str, Run]
) -> None:
    assert journaled["returned"] == runs["default"]["outputs"]
    assert journaled["published"] == journaled["returned"]
    assert journaled["reasons"] == ["length"] * len(ARRIVALS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_continued_response_equals_the_whole_one(continued: dict[str, Any], name: str) -> None:
    """Tokens, text and reason of the end are the same."""
    assert [part for _, part in continued[name]] == [whole for whole, _ in continued[name]]
    assert any(len(tokens) > 1 for (tokens, _, _), _ in continued[name])


@pytest.mark.parametrize("name", INEXACT)
def test_penalties_on_output_do_not_count_the_first_tokens(
    continued: dict[str, Any], name: str
) -> None:
    assert [part for _, part in continued[name]] != [whole for whole, _ in continued[name]]


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_sessions(offloaded: dict[str, Run], name: str) -> None:
    run = offloaded[name]
    assert run["outputs"] == offloaded["not offloaded"]["outputs"]
    turns = [f"turn {number}" for number in range(SESSIONS)]
    assert [run["cached"][turn] for turn in turns] == [PROMPT // 32 * 32] * SESSIONS
    # With policies, turns pass the long prompt that arrived before them.
    ended = list(run["outputs"])
    fresh = ended.index(FRESH)
    assert ended[fresh + 1 :] == (turns if OFFLOADED[name] is None else [])


def max_prefill_beside_decodes(run: Run) -> int:
    return max(sum(step) - step.count(1) for step in run["steps"] if 1 in step)


def max_prompts_in_a_step(run: Run) -> int:
    return max(sum(tokens > 1 for tokens in step) for step in run["steps"])


SIGNS: dict[str, Callable[[Run, Run], bool]] = {
    "static_batching": lambda ours, _: max(map(len, ours["steps"])) == 3,
    "prefill_first": lambda ours, _: ours["counters"]["prefill_first"]["paused_steps"] > 10,
    "lanes": lambda ours, theirs: ours["steps"] != theirs["steps"],
    "long_prompt": lambda ours, theirs: ours["steps"] != theirs["steps"],
    "deferred_prefill": lambda ours, _: (
        sum(
            count
            for name, count in ours["counters"]["deferred_prefill"].items()
            if name.startswith("holds_ended")
        )
        > 0
    ),
    "rotation": lambda ours, theirs: max_prompts_in_a_step(ours) > max_prompts_in_a_step(theirs),
    "chunk_budget": lambda ours, _: max_prefill_beside_decodes(ours) == 32,
}


@pytest.mark.parametrize("name", SIGNS)
def test_policy_had_its_effect(runs: dict[str, Run], name: str) -> None:
    assert SIGNS[name](runs[name], runs["default"])


@pytest.mark.parametrize("name", SETS)
def test_simulated_steps_match_the_engines_steps(runs: dict[str, Run], name: str) -> None:
    assert simulated(SETS[name]) == runs[name]["steps"]


def simulated(policies: dict[str, Any] | None) -> list[list[int]]:
    """Return the steps of the same arrivals in virtual time."""
    from vllm_sched.engine.simulated import EngineSettings, NewRequest, SimulatedEngine

    engine = SimulatedEngine(
        EngineSettings(
            max_model_len=2048, kv_tokens=100 * 32, block_tokens=32, max_num_seqs=6,
            max_num_batched_tokens=256, prefix_caching=False, async_scheduling=False,
            policies=policies or {},
        )
    )  # fmt: skip
    waiting = list(enumerate(ARRIVALS))
    steps: list[list[int]] = []
    now = 0.0
    for number in range(3000):
        while waiting and waiting[0][1][0] <= number:
            index, (_, prompt, output, lane) = waiting.pop(0)
            extra_args = {} if lane is None else {"lane": lane}
            engine.add(NewRequest(str(index), prompt, output, extra_args=extra_args), now)
        if engine.num_unfinished:
            step = engine.schedule(now)
            steps.append([] if step is None else sorted(step.output.num_scheduled_tokens.values()))
            if step is not None:
                now += seconds_of(len(steps), steps[-1])
                engine.finish(step, now)
        elif not waiting:
            return steps
    raise AssertionError(f"{engine.num_unfinished} never finished")

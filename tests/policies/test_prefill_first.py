"""Prefill first: a new prompt is computed at once, and decodes wait."""

from __future__ import annotations

import pytest

from tests.policies.closed_loop import FakeRequest
from tests.policies.making import Bench
from vllm_sched import PolicyScheduler
from vllm_sched.policies.types import Step


def first(**settings: object) -> dict[str, dict[str, object]]:
    return {"prefill_first": settings}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decodes_wait_until_a_new_prompt_is_computed(asynchronous: bool) -> None:
    bench = Bench(first(), scheduler_cls=PolicyScheduler, async_scheduling=asynchronous)
    bench.add("old", 10)
    bench.steps(2)
    bench.add("new", 150)
    assert bench.steps(4) == [{"new": 64}, {"new": 64}, {"new": 22}, {"old": 1, "new": 1}]
    assert bench["prefill_first"].counters() == {"paused_steps": 3, "starvation_releases": 0}


def test_prompts_are_computed_one_after_the_other() -> None:
    bench = Bench(first())
    for name in "ab":
        bench.add(name, 100)
    assert bench.steps(4) == [{"a": 64}, {"a": 36, "b": 28}, {"b": 64}, {"b": 8}]


def test_prefills_precede_decodes_if_decodes_do_not_pause() -> None:
    bench = Bench(first(pause_decodes=False))
    bench.add("old", 10)
    bench.steps(2)
    bench.add("new", 150)
    got = bench.steps(4)
    assert got == [{"old": 1, "new": 63}, {"new": 64}, {"new": 23, "old": 1}, {"old": 1, "new": 1}]


@pytest.mark.parametrize("pause", [True, False])
def test_decodes_pause_at_most_max_pause_s_under_a_stream_of_prompts(pause: bool) -> None:
    bench = Bench(first(pause_decodes=pause, max_pause_s=1.0), max_num_seqs=64)
    bench.add("old", 10, output=1000)
    bench.steps(2)
    at = bench.now
    gaps = []
    for number in range(60):
        bench.add(f"n{number}", 128, output=1)
        if bench.step(0.1).get("old"):
            gaps.append(bench.now - at)
            at = bench.now
    assert gaps
    assert max(gaps) <= 1.0 + 0.2 + 1e-6
    assert bench["prefill_first"].counters()["starvation_releases"] >= 4


@pytest.mark.parametrize(("paused_s", "pauses"), [(0.0, True), (0.99, True), (1.0, False)])
def test_pause_ends_at_max_pause_s(paused_s: float, pauses: bool) -> None:
    policy = Bench(first(max_pause_s=1.0))["prefill_first"]
    step = Step(0, 0.0, 64, 1, prefills=[FakeRequest("new")], paused_s=paused_s)
    assert policy.pauses_decodes(step) is pauses


def test_decodes_do_not_wait_for_a_prompt_without_room() -> None:
    bench = Bench(first(), num_blocks=21, budget=256)
    bench.add("old", 200, output=100)
    bench.step()
    bench.add("stuck", 250)
    got = [tokens.get("old", 0) for tokens in bench.steps(10)]
    assert sum(got) >= 9
    bench.drain()


def test_decodes_do_not_wait_for_a_prompt_without_a_slot() -> None:
    bench = Bench(first(), max_num_seqs=1)
    bench.add("old", 10, output=5)
    bench.step()
    bench.add("new", 10)
    assert bench.step() == {"old": 1}


def test_gauge_shows_whether_decodes_wait() -> None:
    bench = Bench(first())
    bench.add("old", 10)
    bench.steps(2)
    assert bench["prefill_first"].gauges() == {"decodes_paused": 0}
    bench.add("new", 150)
    bench.step()
    assert bench["prefill_first"].gauges() == {"decodes_paused": 1}
    bench.steps(4)
    assert bench["prefill_first"].gauges() == {"decodes_paused": 0}


def test_decodes_do_not_wait_for_a_blocked_prompt() -> None:
    bench = Bench({"prefill_first": {}})
    bench.add("d", 10, output=500)
    bench.step()
    bench.turn_away("lora")
    bench.add("lora", 100)
    assert sum("d" in step for step in bench.steps(18)) >= 15

"""Prefill first: a new prompt is computed at once, and decodes wait."""

from __future__ import annotations

import pytest

from tests.policies.closed_loop import FakeRequest
from tests.policies.making import Bench, add, add_all
from vllm_sched.policies.types import Step


def first(**settings: object) -> dict[str, dict[str, object]]:
    return {"prefill_first": settings}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decodes_wait_until_a_new_prompt_is_computed(asynchronous: bool) -> None:
    bench = Bench(first(), async_scheduling=asynchronous)
    policy = bench["prefill_first"]
    bench.play(add("old", 10), 2)
    assert policy.gauges() == {"decodes_paused": 0}
    bench.play(add("new", 150), {"new": 64})
    assert policy.gauges() == {"decodes_paused": 1}
    bench.play({"new": 64}, {"new": 22}, {"old": 1, "new": 1})
    assert policy.gauges() == {"decodes_paused": 0}
    assert policy.counters() == {"paused_steps": 3, "starvation_releases": 0}


def test_prompts_are_computed_one_after_the_other() -> None:
    Bench(first()).play(add_all("ab", 100), {"a": 64}, {"a": 36, "b": 28}, {"b": 64}, {"b": 8})


def test_decodes_do_not_wait_for_a_prompt_without_a_slot() -> None:
    Bench(first(), max_num_seqs=1).play(add("old", 10, output=5), 1, add("new", 10), {"old": 1})


def test_decodes_pause_at_most_max_pause_s_under_a_stream_of_prompts() -> None:
    bench = Bench(first(max_pause_s=1.0), max_num_seqs=64)
    bench.play(add("old", 10, output=1000), 2)
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
    bench.play(add("old", 200, output=100), 1, add("stuck", 250))
    assert sum(tokens.get("old", 0) for tokens in bench.steps(10)) >= 9
    bench.drain()

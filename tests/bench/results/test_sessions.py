"""Figures of sessions."""

from __future__ import annotations

import pytest

from tests.bench.canned import printed
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.sessions import (
    PlayedSession,
    session_figures,
    session_table,
    unfinished_warning,
)


def turn(at: float, ttft: float, prompt: int, context: int, cached: int | None = None) -> Outcome:
    return Outcome(
        at, "agent", prompt, 2, ticks=[at + ttft, at + ttft + 1], completed=2, session="s",
        context_tokens=context, cached_tokens=cached,
    )  # fmt: skip


SESSIONS = [
    PlayedSession("a", 10.0, 4, done=4, think_s=5.0, end=40.0),
    PlayedSession("b", 0.0, 30, done=30, think_s=100.0, end=2500.0, sub_agents=2),
    PlayedSession("c", 0.0, 3, done=1, failed=True),
    PlayedSession("d", 0.0, 8, done=7),
]
OUTCOMES = [
    turn(0.0, 3.0, 1000, 0, 0),
    turn(9.0, 0.5, 1250, 1000, 800),
    turn(19.0, 0.7, 1500, 1400),
    Outcome(0.0, "agent", 9000, 2, session="s", error="gone"),
]


def test_only_finished_tasks_have_a_time() -> None:
    found = session_figures(SESSIONS, OUTCOMES)
    counts = [found[key] for key in ("begun", "finished", "failed", "unfinished", "sub_agents")]
    assert counts == [4, 2, 1, 1, 2]
    assert found["p50_task_s"] == pytest.approx((30 + 2500) / 2)
    assert found["p50_task_without_thinking_s"] == pytest.approx((25 + 2400) / 2)
    assert [task["task_s"] for task in found["tasks"]] == [30.0, 2500.0, None, None]


def test_a_warning_counts_the_tasks_without_a_time() -> None:
    (warning,) = unfinished_warning(SESSIONS)
    assert "2 of 4 tasks did not finish" in warning
    assert not unfinished_warning(SESSIONS[:2])


def test_tasks_are_grouped_by_their_turns() -> None:
    groups = session_figures(SESSIONS, OUTCOMES)["by_turns"]
    assert list(groups) == ["1-5", "21-100"]
    assert [group["p50_task_s"] for group in groups.values()] == [30.0, 2500.0]


def test_first_and_later_turns_and_reuse_are_told_apart() -> None:
    found = session_figures(SESSIONS, OUTCOMES)
    assert found["p50_first_ttft_s"] == pytest.approx(3.0)
    assert found["p50_later_ttft_s"] == pytest.approx(0.6)
    assert found["repeated_share"] == pytest.approx(2400 / 3750)
    assert found["high_reuse_turns"] == pytest.approx(1 / 3)
    assert found["cached_share"] == pytest.approx(800 / 2250)  # of the turns that report it


def test_the_table_shows_times_and_shares() -> None:
    text = " ".join(printed(session_table(session_figures(SESSIONS, OUTCOMES))).split())
    for words in (
        "tasks finished 2", "failed 1", "not finished 1", "task of 21-100 turns p50 / p90 (1) "
        "2,500 s / 2,500 s", "prompt tokens from caches 35.5 %",
    ):  # fmt: skip
        assert words in text


def test_nothing_finished_has_no_figures() -> None:
    found = session_figures([SESSIONS[3]], [])
    assert (found["p50_task_s"], found["repeated_share"], found["cached_share"]) == (None,) * 3
    assert "task p50 / p90 - / -" in " ".join(printed(session_table(found)).split())

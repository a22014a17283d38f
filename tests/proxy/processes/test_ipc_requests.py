"""What a supervisor asks its processes."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.processes import ipc_requests as module
from proxy.processes.child import Child
from proxy.processes.ipc_messages import IpcQuestion
from proxy.processes.ipc_requests import PendingQuestions
from proxy.processes.metrics_totals import MetricsTotals
from tests.proxy.processes.test_metrics_merge import page
from tests.proxy.processes.test_metrics_totals import summed
from tests.proxy.wire.site import eventually


class Asked:
    """Processes that hear what they are asked."""

    def __init__(self, *indices: int) -> None:
        self.heard: list[tuple[int, Any]] = []
        self.children = [self._child(index) for index in indices]

    def _child(self, index: int) -> Child:
        channel = SimpleNamespace(send=lambda message: self.heard.append((index, message)))
        return cast("Child", SimpleNamespace(index=index, channel=channel))

    async def under_way(
        self, questions: PendingQuestions, number: int = 77
    ) -> asyncio.Task[dict[int, Any]]:
        """Put one to all."""
        putting = asyncio.create_task(
            questions.put(IpcQuestion(number, "page", True), self.children)
        )
        await eventually(lambda: len(self.heard) >= len(self.children))
        return putting


async def test_answers_come_in_the_order_of_who_was_asked() -> None:
    questions, asked = PendingQuestions(), Asked(2, 0, 1)
    putting = await asked.under_way(questions)
    (number,) = {message.number for _, message in asked.heard}
    assert all((m.what, m.given) == ("page", True) for _, m in asked.heard)
    for index in range(3):
        questions.answered(index, number, f"of {index}")
    assert list((await putting).items()) == [(2, "of 2"), (0, "of 0"), (1, "of 1")]


async def test_questions_at_once_are_told_apart() -> None:
    questions, first, second = PendingQuestions(), Asked(0), Asked(0)
    one, other = await first.under_way(questions, 1), await second.under_way(questions, 2)
    questions.answered(0, second.heard[0][1].number, "second")
    questions.answered(0, first.heard[0][1].number, "first")
    assert (await one, await other) == ({0: "first"}, {0: "second"})


async def test_nobody_waits_for_one_that_is_no_more() -> None:
    questions, asked = PendingQuestions(), Asked(0, 1)
    putting = await asked.under_way(questions)
    questions.answered(1, asked.heard[0][1].number, "here")
    questions.gone(0)
    assert await putting == {1: "here"}


async def test_nobody_waits_for_one_that_has_no_answer() -> None:
    questions, asked = PendingQuestions(), Asked(0, 1)
    putting = await asked.under_way(questions)
    questions.unanswered(0, 77)
    questions.answered(1, 77, "here")
    assert await asyncio.wait_for(putting, 1.0) == {1: "here"}
    questions.unanswered(0, 77)  # of which nobody waits any more


async def test_what_one_said_who_is_no_more_is_not_taken() -> None:
    """Its counts are in the past's by then: with its answer they would count twice."""
    questions, asked, totals = PendingQuestions(), Asked(0, 1), MetricsTotals()
    pages = {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)}
    summed(totals, pages)
    putting = await asked.under_way(questions)
    number = asked.heard[0][1].number
    questions.answered(1, number, pages[1])
    totals.gone(1)
    questions.gone(1)
    questions.answered(0, number, pages[0])
    assert summed(totals, await putting)['proxy_requests_total{worker="a"}'] == "3"


async def test_who_is_late_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    questions, asked = PendingQuestions(), Asked(0, 1, 2)
    number = 77

    def answers(_: Any) -> None:
        questions.answered(1, number, "in time")

    asked.children[1].channel = cast("Any", SimpleNamespace(send=answers))
    with caplog.at_level(logging.WARNING):
        found = await questions.put(IpcQuestion(number, "page", True), asked.children)
    assert found == {1: "in time"}
    assert "no answer from process 0, 2" in caplog.text
    questions.answered(0, number, "too late")  # and is heard by nobody


async def test_of_nobody_nothing_is_waited_for() -> None:
    assert await PendingQuestions().put(IpcQuestion(1, "page"), []) == {}

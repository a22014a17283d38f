"""Questions of the supervisor to its processes."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.processes import ipc_requests as module
from proxy.processes.child import Child
from proxy.processes.ipc_messages import IpcAnswer, IpcQuestion
from proxy.processes.ipc_requests import PendingQuestions
from proxy.processes.metrics_totals import MetricsTotals
from tests.proxy.processes.test_metrics_merge import page
from tests.proxy.processes.test_metrics_totals import summed
from tests.proxy.wire.site import eventually


class RecordingChildren:
    def __init__(self, *indices: int) -> None:
        self.messages: list[tuple[int, Any]] = []
        self.children = [self._child(index) for index in indices]

    def _child(self, index: int) -> Child:
        channel = SimpleNamespace(send=lambda message: self.messages.append((index, message)))
        return cast("Child", SimpleNamespace(index=index, channel=channel))

    async def start(
        self, questions: PendingQuestions, number: int = 77
    ) -> asyncio.Task[dict[int, Any]]:
        """Put a question to all processes."""
        asking = asyncio.create_task(
            questions.ask(IpcQuestion(number, "page", True), self.children)
        )
        await eventually(lambda: len(self.messages) >= len(self.children))
        return asking


async def test_answers_are_in_the_order_of_processes() -> None:
    questions, children = PendingQuestions(), RecordingChildren(2, 0, 1)
    asking = await children.start(questions)
    (number,) = {message.number for _, message in children.messages}
    assert all((m.kind, m.argument) == ("page", True) for _, m in children.messages)
    for index in range(3):
        questions.record(index, IpcAnswer(number, f"of {index}"))
    assert list((await asking).items()) == [(2, "of 2"), (0, "of 0"), (1, "of 1")]


async def test_concurrent_questions_are_distinguished() -> None:
    questions, first, second = PendingQuestions(), RecordingChildren(0), RecordingChildren(0)
    one, other = await first.start(questions, 1), await second.start(questions, 2)
    questions.record(0, IpcAnswer(second.messages[0][1].number, "second"))
    questions.record(0, IpcAnswer(first.messages[0][1].number, "first"))
    assert (await one, await other) == ({0: "first"}, {0: "second"})


async def test_question_ends_when_processes_are_gone_or_cannot_answer() -> None:
    questions, children = PendingQuestions(), RecordingChildren(0, 1, 2)
    asking = await children.start(questions)
    questions.remove_process(0)
    questions.record(2, IpcAnswer(77, failed=True))
    questions.record(1, IpcAnswer(77, "here"))
    assert await asyncio.wait_for(asking, 1.0) == {1: "here"}
    questions.record(2, IpcAnswer(77, failed=True))  # after the end of the question
    assert await asyncio.wait_for(questions.ask(IpcQuestion(78, "page"), []), 1.0) == {}


async def test_answer_of_a_dead_process_is_dropped() -> None:
    """The totals already contain its counts."""
    questions, children, totals = PendingQuestions(), RecordingChildren(0, 1), MetricsTotals()
    pages = {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)}
    summed(totals, pages)
    asking = await children.start(questions)
    number = children.messages[0][1].number
    questions.record(1, IpcAnswer(number, pages[1]))
    totals.keep_counters(1)
    questions.remove_process(1)
    questions.record(0, IpcAnswer(number, pages[0]))
    assert summed(totals, await asking)['proxy_requests_total{worker="a"}'] == "3"


async def test_late_process_is_left_out_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    questions, children = PendingQuestions(), RecordingChildren(0, 1, 2)

    def answer_in_time(_: Any) -> None:
        questions.record(1, IpcAnswer(77, "in time"))

    children.children[1].channel = cast("Any", SimpleNamespace(send=answer_in_time))
    with caplog.at_level(logging.WARNING):
        found = await questions.ask(IpcQuestion(77, "page", True), children.children)
    assert found == {1: "in time"}
    assert "no answer from process 0, 2" in caplog.text
    questions.record(0, IpcAnswer(77, "too late"))  # no effect

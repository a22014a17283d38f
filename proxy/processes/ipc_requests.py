"""Questions of the supervisor to its processes, with a timeout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from proxy.processes.child import Child
from proxy.processes.ipc_messages import IpcAnswer, IpcQuestion

logger = logging.getLogger(__name__)

ANSWER_S = 4.0  # timeout; a metrics page for a thousand workers is written in slices


class PendingQuestions:
    """Questions to processes, until all have answered or the time is over."""

    def __init__(self) -> None:
        self._answers: dict[int, dict[int, asyncio.Future[Any]]] = {}  # by question and process

    async def ask(self, question: IpcQuestion, children: Sequence[Child]) -> dict[int, Any]:
        """Ask these processes and return the answers in time, by process index.

        Each question needs a unique number.
        """
        loop = asyncio.get_running_loop()
        answers = {child.index: loop.create_future() for child in children}
        self._answers[question.number] = answers
        for child in children:
            child.channel.send(question)
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=ANSWER_S)
        finally:
            del self._answers[question.number]
        late = [index for index, answer in answers.items() if not answer.done()]
        if late:
            logger.warning("no answer from process %s", ", ".join(map(str, sorted(late))))
        return {
            index: answer.result()
            for index, answer in answers.items()
            if answer.done() and not answer.cancelled()
        }

    def record(self, index: int, message: IpcAnswer) -> None:
        """Record a process's answer, or that it cannot answer."""
        answer = self._answers.get(message.number, {}).get(index)
        if answer is None:
            return
        if message.failed:
            answer.cancel()
        else:
            answer.set_result(message.result)

    def remove_process(self, index: int) -> None:
        """Drop an exited process and its answers.

        Its last counters are already part of the totals of exited processes.
        """
        for answers in self._answers.values():
            if (answer := answers.pop(index, None)) is not None:
                answer.cancel()

"""Questions of the supervisor to its processes, with a timeout."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.processes.child import Child
    from proxy.processes.ipc_messages import IpcQuestion

logger = logging.getLogger(__name__)

ANSWER_S = 4.0  # timeout; a metrics page for a thousand workers is written in slices


@dataclass(slots=True)
class PendingQuestion:
    """A question with outstanding answers."""

    missing: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def stop_waiting_for(self, index: int) -> None:
        self.missing.discard(index)
        if not self.missing:
            self.complete.set()


class PendingQuestions:
    """All questions with outstanding answers."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingQuestion] = {}

    async def ask(self, question: IpcQuestion, children: Sequence[Child]) -> dict[int, Any]:
        """Ask these processes and return the answers in time, by process index.

        Each question needs a unique number.
        """
        number = question.number
        pending = self._pending[number] = PendingQuestion({child.index for child in children})
        for child in children:
            child.channel.send(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                if pending.missing:
                    await pending.complete.wait()
        except TimeoutError:
            late = ", ".join(map(str, sorted(pending.missing)))
            logger.warning("no answer from process %s", late)
        finally:
            del self._pending[number]
        answers = pending.answers
        return {child.index: answers[child.index] for child in children if child.index in answers}

    def record_answer(self, index: int, number: int, found: object) -> None:
        if (pending := self._pending.get(number)) is not None:
            pending.answers[index] = found
            pending.stop_waiting_for(index)

    def record_no_answer(self, index: int, number: int) -> None:
        """Record that a process cannot answer."""
        if (pending := self._pending.get(number)) is not None:
            pending.stop_waiting_for(index)

    def remove_process(self, index: int) -> None:
        """Drop an exited process and its answers.

        Its last counters are already part of the totals of exited processes.
        """
        for pending in self._pending.values():
            pending.answers.pop(index, None)
            pending.stop_waiting_for(index)

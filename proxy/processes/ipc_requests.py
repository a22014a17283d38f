"""Questions that a supervisor puts to its processes, and has answered in time or not at all."""

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

ANSWER_S = 4.0  # that a question may take: a page of a thousand workers is written in slices


@dataclass(slots=True)
class PendingQuestion:
    """A question, until all have answered it."""

    missing: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def without(self, index: int) -> None:
        """Wait no longer for that process."""
        self.missing.discard(index)
        if not self.missing:
            self.complete.set()


class PendingQuestions:
    """Those under way."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingQuestion] = {}

    async def put(self, question: IpcQuestion, children: Sequence[Child]) -> dict[int, Any]:
        """Ask these; those that do not answer in time are left out. No two have one number."""
        number = question.number
        pending = self._pending[number] = PendingQuestion({child.index for child in children})
        for child in children:
            child.channel.say(question)
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

    def answered(self, index: int, number: int, found: object) -> None:
        """Hear what one says."""
        if (pending := self._pending.get(number)) is not None:
            pending.answers[index] = found
            pending.without(index)

    def unanswered(self, index: int, number: int) -> None:
        """Hear that one has nothing to say."""
        if (pending := self._pending.get(number)) is not None:
            pending.without(index)

    def gone(self, index: int) -> None:
        """Wait for nothing from a process that is no more, and take nothing that it said.

        What it counted is counted as of the past by now.
        """
        for pending in self._pending.values():
            pending.answers.pop(index, None)
            pending.without(index)

"""Requests leave a worker that is drained at once.

A sweep moves a few of them: each costs another worker a prefill. What can't be continued ends where
it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from proxy.core.request.continuable import LASTING, WAITS

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.wire.context import ServedExchange

logger = logging.getLogger(__name__)

MAX_MOVES_PER_SWEEP = 32
POLL_S = 0.05


class WorkerMoves:
    """The requests that one worker had when it was drained."""

    def __init__(self, worker: Worker, exchanges: Iterable[ServedExchange]) -> None:
        self.worker = worker
        self.moved = 0
        self._why = {each: WAITS for each in exchanges if each.uses(worker)}
        self._waiting = deque(self._why)

    @property
    def ended(self) -> bool:
        """True if no request waits to be moved."""
        return not self._waiting or not self.worker.draining

    def step(self, now: float) -> None:
        waiting = self._waiting
        for _ in range(min(MAX_MOVES_PER_SWEEP, len(waiting))):
            exchange = waiting.popleft()
            if not exchange.uses(self.worker):
                continue
            why = self._why[exchange] = exchange.move(now)
            if not why:
                self.moved += 1
            elif why not in LASTING:
                waiting.append(exchange)

    def remaining(self) -> dict[str, int]:
        """Return how many requests the worker still has, by reason."""
        return dict(Counter(why for each, why in self._why.items() if each.uses(self.worker)))


class Moves:
    """All workers that requests leave, in one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[Worker, WorkerMoves] = {}

    async def leave(
        self, worker: Worker, exchanges: Iterable[ServedExchange], within_s: float
    ) -> tuple[int, Mapping[str, int]]:
        """Move requests, and return after a while how many have moved, and why others have not."""
        moves = self._of[worker] = WorkerMoves(worker, exchanges)
        self.step(now := self._clock())
        give_up = now + within_s
        while not moves.ended and self._clock() < give_up:
            await asyncio.sleep(POLL_S)
        return moves.moved, moves.remaining()

    def step(self, now: float) -> None:
        """Move the next requests."""
        for worker, moves in list(self._of.items()):
            moves.step(now)
            if moves.ended:
                del self._of[worker]
                left = ", ".join(f"{why} {n}" for why, n in moves.remaining().items())
                logger.info(
                    "worker %s: %d requests moved, remaining: %s",
                    worker.name,
                    moves.moved,
                    left or "none",
                )

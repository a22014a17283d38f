"""Requests leave a worker that is drained at once.

A sweep moves a few of them: each costs another worker a prefill. What can't be continued ends where
it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from proxy.core.request.continuable import LASTING, WAITS

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.wire.context import ServedExchange

logger = logging.getLogger(__name__)

MovedRequests: TypeAlias = "tuple[int, Mapping[str, int]]"  # and those that remain, by reason
MAX_MOVES_PER_SWEEP = 32


class WorkerMoves:
    """The requests that one worker had when it was drained."""

    def __init__(self, worker: Worker, exchanges: Iterable[ServedExchange]) -> None:
        self.worker = worker
        self.moved = 0
        self.ended = asyncio.Event()
        self._why = {each: WAITS for each in exchanges if each.uses(worker)}
        self._waiting = deque(self._why)

    def step(self, now: float) -> None:
        """Move the next requests."""
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
        if not waiting:
            self.ended.set()

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
    ) -> MovedRequests:
        """Move requests; return when all have moved that can, or after a while."""
        moves = self._of[worker] = WorkerMoves(worker, exchanges)
        self.step(self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await moves.ended.wait()
        return moves.moved, moves.remaining()

    def step(self, now: float) -> None:
        """Move the next requests."""
        for worker, moves in list(self._of.items()):
            if worker.draining:
                moves.step(now)
            else:
                moves.ended.set()
            if moves.ended.is_set():
                del self._of[worker]
                left = ", ".join(f"{why} {n}" for why, n in moves.remaining().items())
                logger.info(
                    "worker %s: %d requests moved, remaining: %s",
                    worker.name,
                    moves.moved,
                    left or "none",
                )

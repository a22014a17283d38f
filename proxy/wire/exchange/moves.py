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
from dataclasses import replace
from math import inf
from typing import TypeAlias

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Outcome
from proxy.core.request.continuable import (
    ENDS,
    LASTING,
    NO_WORKER,
    NOT_KEPT,
    PINNED,
    WAITS,
)
from proxy.core.request.continued_text import TextSoFar
from proxy.wire.context import ServedExchange
from proxy.wire.exchange.continuation import (
    Obstacle,
    continuing_attempts,
    find_output,
    needs_journal,
    prepare_continuation,
)
from proxy.wire.exchange.owner import AttemptOwner
from proxy.wire.exchange.response_writer import ResponseWriter
from proxy.wire.worker.connection import WorkerError

logger = logging.getLogger(__name__)

MovedRequests: TypeAlias = "tuple[int, Mapping[str, int]]"  # and the remaining, by reason
MAX_MOVES_PER_SWEEP = 32
# A busy engine's journal is later than its response: 40 ms were measured.
SETTLE_S = 0.15
MOVE_S = 3.0  # less than a process has for an answer


def move_request(
    exchange: AttemptOwner,
    now: float,
    lease: Lease,
    response: ResponseWriter | None,
    *,
    settled: bool,
) -> str:
    """Send a request to another worker if one has room; return why not, or nothing.

    `settled`: the journal has all tokens that the client has.
    """
    if exchange.last_refusal is not None or (response is not None and response.is_complete):
        return ENDS
    if lease.info.pinned:
        return PINNED
    attempts = replace(lease.attempts, moved=True)
    info, placer = attempts.enlarged or lease.info, exchange.wire.router.placer
    if response is None or not response.has_begun or exchange.repeated is not None:
        if not placer.may_move(info, now, attempts):
            return NO_WORKER
    else:
        if exchange.sent_text is None:
            return NOT_KEPT
        output = find_output(exchange, lease, response, since=inf)
        if isinstance(output, Obstacle):
            return output.reason
        attempts = continuing_attempts(exchange, attempts, needs_journal=needs_journal(output))
        if not placer.may_move(info, now, attempts):
            return NO_WORKER
        if not isinstance(output, TextSoFar) and not settled:
            return WAITS
        prepare_continuation(exchange, lease, response, output)
    refusal = exchange.try_another(now, Outcome.MOOT, WorkerError.DRAINED)
    if refusal is not None:  # in this moment another process has filled the worker
        exchange.refuse(now, refusal)
    return ""


class WorkerMoves:
    """The requests that one worker had when it was drained."""

    def __init__(self, worker: Worker, exchanges: Iterable[ServedExchange]) -> None:
        self.worker = worker
        self.moved = 0
        self.ended = asyncio.Event()
        self._why_not_moved = {exchange: WAITS for exchange in exchanges if exchange.uses(worker)}
        self._waiting = deque(self._why_not_moved)
        self._await_journal: list[ServedExchange] = []  # until it has their last tokens

    def step(self, now: float) -> None:
        first, self._await_journal = self._await_journal, []
        count = min(MAX_MOVES_PER_SWEEP, len(self._waiting))
        for exchange in (*first, *(self._waiting.popleft() for _ in range(count))):
            if not exchange.uses(self.worker):
                continue
            why = self._why_not_moved[exchange] = exchange.move(now)
            if not why:
                self.moved += 1
            elif why == WAITS:
                self._await_journal.append(exchange)
            elif why not in LASTING:
                self._waiting.append(exchange)
        if not (self._waiting or self._await_journal):
            self.ended.set()

    def stop(self, now: float) -> None:
        """Let the requests that have not moved go on."""
        for exchange in self._await_journal:
            exchange.release(now)
        self.ended.set()

    def remaining(self) -> dict[str, int]:
        """Return how many requests the worker still has, by reason."""
        why_not = self._why_not_moved.items()
        return dict(Counter(why for exchange, why in why_not if exchange.uses(self.worker)))


class Moves:
    """All workers that requests leave, in one process."""

    def __init__(
        self, roster: Roster, exchanges: Iterable[ServedExchange], clock: Callable[[], float]
    ) -> None:
        self._roster = roster
        self._exchanges = exchanges
        self._clock = clock
        self._moves_of: dict[Worker, WorkerMoves] = {}

    async def move_all(self, name: str, within_s: float = MOVE_S) -> MovedRequests:
        """Move requests off a drained worker; return when all have moved that can, or later."""
        worker = self._roster.get(name)
        if worker is None:
            return 0, {}
        if not worker.draining:  # the message of the leading process comes later
            self._roster.drain(name)
        now = self._clock()
        if (earlier := self._moves_of.get(worker)) is not None:
            earlier.stop(now)
        moves = self._moves_of[worker] = WorkerMoves(worker, self._exchanges)
        self.step(now)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await moves.ended.wait()
        return moves.moved, moves.remaining()

    def step(self, now: float) -> None:
        for worker, moves in list(self._moves_of.items()):
            if worker.draining:
                moves.step(now)
            else:
                moves.stop(now)
            if moves.ended.is_set():
                del self._moves_of[worker]
                left = ", ".join(f"{why} {n}" for why, n in moves.remaining().items())
                logger.info(
                    "worker %s: %d requests moved, remaining: %s",
                    worker.name,
                    moves.moved,
                    left or "none",
                )

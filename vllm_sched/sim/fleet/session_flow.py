"""Sessions in virtual time: a turn arrives when the last answer ended, and after a think time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Protocol, TypeAlias

from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.sessions import PlayedSession
from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn, plan_session
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.events import ARRIVAL_RANK, EventQueue

SubmitTurn: TypeAlias = Callable[[Request, float, Callable[[float], None]], Outcome]


class SequenceEnded(Protocol):
    def __call__(self, now: float, think_s: float, *, complete: bool) -> None: ...


class SessionFlow:
    def __init__(
        self, queue: EventQueue, send: SubmitTurn, *, limit: int, end: float | None
    ) -> None:
        """Send turns of at most `limit` tokens, and none from `end` on."""
        self.queue = queue
        self.send = send
        self.end = inf if end is None else end
        self.played: list[PlayedSession] = []
        self.open = 0  # sessions under way
        self.cut = 0  # turns that did not fit
        self._limit = limit

    def begin(self, request: Request, now: float, ended: Callable[[float], None] | None) -> None:
        """Play a session; `ended` is called after its last turn."""
        played = PlayedSession.from_request(request, now)
        self.played.append(played)
        self.open += 1

        def end_session(now: float, think_s: float, *, complete: bool) -> None:
            self.open -= 1
            played.think_s = think_s
            if complete:
                played.end = now
            if ended is not None:
                ended(now)

        turns = plan_session(request, self._limit)
        TurnSequence(self, turns, played, end_session, own=True).play_next(now)


class TurnSequence:
    """The turns of a session or, unless `own`, of a sub-agent; `ended` is called after the last."""

    def __init__(
        self,
        flow: SessionFlow,
        turns: Iterable[PlannedTurn],
        played: PlayedSession,
        ended: SequenceEnded,
        *,
        own: bool,
    ) -> None:
        self._flow = flow
        self._turns = iter(turns)
        self._played = played
        self._ended = ended
        self._own = own
        self._think_s = 0.0  # its own, and that of the sub-agents that it waited for
        self._forks = 0  # sub-agents under way
        self._forks_complete = True

    def play_next(self, now: float) -> None:
        turn = next(self._turns, None)
        if turn is None:
            self._end(now, complete=True)
            return
        self._think_s += turn.think_s
        at = min(now + turn.think_s, self._flow.end)
        self._flow.queue.schedule(at, partial(self._send, turn), rank=ARRIVAL_RANK)

    def _send(self, turn: PlannedTurn, now: float) -> None:
        flow = self._flow
        if now >= flow.end or self._played.failed:
            self._end(now, complete=False)
            return
        flow.cut += turn.cut
        self._outcome = flow.send(replace(turn.request, at=now), now, partial(self._answered, turn))

    def _answered(self, turn: PlannedTurn, now: float) -> None:
        if self._outcome.error:
            self._played.failed = True
            self._end(now, complete=False)
            return
        self._played.done += self._own
        self._forks = len(turn.forks)
        for fork in turn.forks:
            sequence = TurnSequence(self._flow, fork, self._played, self._end_fork, own=False)
            sequence.play_next(now)
        if not turn.forks:
            self.play_next(now)

    def _end(self, now: float, *, complete: bool) -> None:
        self._ended(now, self._think_s, complete=complete)

    def _end_fork(self, now: float, think_s: float, *, complete: bool) -> None:
        self._forks -= 1
        self._forks_complete &= complete
        self._played.sub_agents += complete
        if self._forks:
            return
        self._think_s += think_s  # of the last one
        if self._forks_complete:
            self.play_next(now)
        else:
            self._end(now, complete=False)

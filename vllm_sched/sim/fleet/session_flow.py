"""Sessions in virtual time: a turn arrives when the last answer ended, and after a think time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from vllm_sched.bench.results.sessions import PlayedSession
from vllm_sched.bench.traffic.sessions.conversation import plan_session
from vllm_sched.sim.fleet.events import ARRIVAL_RANK

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_sched.bench.results.outcome import Outcome
    from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn
    from vllm_sched.bench.traffic.types import Request
    from vllm_sched.sim.fleet.events import EventQueue

    # Accepts a turn at a time; the call is made at its end, in a later event.
    SubmitTurn: TypeAlias = Callable[[Request, float, Callable[[float], None]], Outcome]


class SessionFlow:
    def __init__(
        self, queue: EventQueue, send: SubmitTurn, *, limit: int, end: float | None
    ) -> None:
        """Send turns of at most `limit` tokens, and none from `end` on."""
        self.played: list[PlayedSession] = []
        self.open = 0  # sessions under way
        self.cut = 0  # turns that did not fit
        self._queue = queue
        self._send = send
        self._limit = limit
        self._end = inf if end is None else end

    def begin(self, request: Request, now: float, ended: Callable[[float], None] | None) -> None:
        """Play a session; `ended` is called after its last turn."""
        played = PlayedSession.from_request(request, now)
        self.played.append(played)
        self.open += 1

        def over(now: float, *, whole: bool) -> None:
            self.open -= 1
            if whole:
                played.end = now
            if ended is not None:
                ended(now)

        self._play(plan_session(request, self._limit), played, over, now, own=True)

    def _play(
        self,
        turns: tuple[PlannedTurn, ...],
        played: PlayedSession,
        over: Callable[..., None],
        now: float,
        *,
        own: bool,
    ) -> None:
        """Play the turns of a session or, unless `own`, of a sub-agent."""
        rest = iter(turns)

        def following(now: float) -> None:
            turn = next(rest, None)
            if turn is None:
                over(now, whole=True)
                return
            played.think_s += turn.think_s * own
            at = min(now + turn.think_s, self._end)
            self._queue.schedule(at, partial(send, turn), rank=ARRIVAL_RANK)

        def send(turn: PlannedTurn, now: float) -> None:
            if now >= self._end or played.failed:
                over(now, whole=False)
                return
            self.cut += turn.cut

            def answered(now: float) -> None:
                if outcome.error:
                    played.failed = True
                    over(now, whole=False)
                    return
                played.done += own
                self._fork(turn, played, now, following, over)

            outcome = self._send(replace(turn.request, at=now), now, answered)

        following(now)

    def _fork(
        self,
        turn: PlannedTurn,
        played: PlayedSession,
        now: float,
        following: Callable[[float], None],
        over: Callable[..., None],
    ) -> None:
        """Play a turn's sub-agents, then the following turn."""
        left, complete = len(turn.forks), True
        if not left:
            following(now)
            return

        def joined(now: float, *, whole: bool) -> None:
            nonlocal left, complete
            left -= 1
            complete &= whole
            played.sub_agents += whole
            if not left and complete:
                following(now)
            elif not left:
                over(now, whole=False)

        for fork in turn.forks:
            self._play(fork, played, joined, now, own=False)

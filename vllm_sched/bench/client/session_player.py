"""Sessions against an endpoint: each prompt is the last prompt, the real answer and new words."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Self, TypeAlias

from vllm_sched.bench.client.endpoint import CHAT
from vllm_sched.bench.client.events import text_of
from vllm_sched.bench.results.sessions import PlayedSession
from vllm_sched.bench.traffic.sessions.conversation import plan_session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vllm_sched.bench.client.endpoint import Endpoint
    from vllm_sched.bench.client.text import Texts
    from vllm_sched.bench.results.outcome import Outcome
    from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn
    from vllm_sched.bench.traffic.types import Request

    SendTurn: TypeAlias = Callable[
        [Request, float, bytes, list[bytes]], Awaitable[tuple[Outcome, float | None]]
    ]


class Transcript:
    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._parts: list[str] = []

    def restart(self, text: str) -> None:
        """Begin anew with a user's text."""
        self._parts = []
        self.extend("user", text)

    def extend(self, role: str, text: str) -> None:
        """Append a message; without chat, its text."""
        escaped = json.dumps(text)
        self._parts.append(
            f'{{"role":"{role}","content":{escaped}}}' if self._chat else escaped[1:-1]
        )

    def copy(self) -> Self:
        made = type(self)(chat=self._chat)
        made._parts = self._parts.copy()
        return made

    def field(self) -> str:
        """Return the field of the request body."""
        if self._chat:
            return f'"messages":[{",".join(self._parts)}]'
        return f'"prompt":"{" ".join(self._parts)}"'


class SessionPlayer:
    def __init__(
        self,
        endpoint: Endpoint,
        texts: Texts,
        send: SendTurn,
        now: Callable[[], float],
        *,
        limit: float,
        end: float | None,
    ) -> None:
        """Send turns of at most `limit` tokens, and none from `end` on."""
        self.played: list[PlayedSession] = []
        self.cut = 0  # turns that did not fit
        self._endpoint = endpoint
        self._texts = texts
        self._send = send
        self._now = now
        self._limit = limit
        self._end = inf if end is None else end

    async def play(self, begin: Request, at: float) -> float | None:
        """Play a session; return the seconds to wait before the next if a turn failed, or None."""
        played = PlayedSession.from_request(begin, at)
        self.played.append(played)
        turns = plan_session(begin, self._limit)
        transcript = Transcript(chat=self._endpoint.path == CHAT)
        pause_s, whole = await self._turns(turns, transcript, at, played, own=True)
        if whole:
            played.end = self._now()
        played.failed = pause_s is not None
        return pause_s

    async def _turns(
        self,
        turns: tuple[PlannedTurn, ...],
        transcript: Transcript,
        at: float,
        played: PlayedSession,
        *,
        own: bool,
        known: int = 0,
    ) -> tuple[float | None, bool]:
        """Return the seconds to wait after a failure (None if none), and whether all were answered.

        The transcript has `known` tokens by the server's count.
        """
        for turn in turns:
            at += turn.think_s
            played.think_s += turn.think_s * own
            body = self._body(turn, transcript)  # large: made while the session thinks
            if (early := min(at, self._end) - self._now()) > 0:
                await asyncio.sleep(early)
            if at >= self._end or played.failed:
                return None, False
            self.cut += turn.cut
            answer: list[bytes] = []
            request = replace(turn.request, at=at)
            if not turn.restarts:
                request = replace(request, context_tokens=known)
            outcome, pause_s = await self._send(request, at, body, answer)
            if pause_s is not None:
                played.failed = True
                return pause_s, False
            at = self._now()
            known = outcome.prompt_tokens + outcome.completed
            played.done += own
            transcript.extend("assistant", text_of(answer))
            if turn.forks:
                ends = await asyncio.gather(
                    *(
                        self._turns(fork, transcript.copy(), at, played, own=False, known=known)
                        for fork in turn.forks
                    )
                )
                played.sub_agents += sum(whole for _, whole in ends)
                if not all(whole for _, whole in ends):
                    pauses = [pause for pause, _ in ends if pause is not None]
                    return max(pauses, default=None), False
                at = self._now()
        return None, True

    def _body(self, turn: PlannedTurn, transcript: Transcript) -> bytes:
        """Return the request body of a turn, and append its new text to the transcript."""
        request, endpoint = turn.request, self._endpoint
        *shared, own = request.shared
        name = f"{own[0]}/{request.turn}"
        if turn.restarts:
            pieces = [*shared, (name, turn.new_tokens)]
            transcript.restart(self._texts.joined(pieces, endpoint.measure))
        else:
            words = round(turn.new_tokens / endpoint.measure.per_word)
            transcript.extend("user", self._texts.text(name, max(words, 1)))
        return endpoint.body_of(transcript.field(), request.output_tokens, request.tenant)

"""Sessions against an endpoint: each prompt is the last prompt, the real answer and new words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Self, TypeAlias

from vllm_sched.bench.client.endpoint import CHAT, Endpoint
from vllm_sched.bench.client.events import text_of
from vllm_sched.bench.client.text import Texts
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.sessions import PlayedSession
from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn, plan_session
from vllm_sched.bench.traffic.types import Request

SendTurn: TypeAlias = Callable[
    [Request, float, bytes, list[bytes]], Awaitable[tuple[Outcome, float | None]]
]


class Transcript:
    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._parts: list[str] = []

    def restart(self, text: str) -> None:
        self._parts = []
        self.extend("user", text)

    def extend(self, role: str, text: str) -> None:
        """Append a message; without chat, its text, and an answer as it was generated."""
        escaped = json.dumps(text)
        if self._chat:
            self._parts.append(f'{{"role":"{role}","content":{escaped}}}')
        else:
            space = " " if self._parts and role == "user" else ""
            self._parts.append(f"{space}{escaped[1:-1]}")

    def copy(self) -> Self:
        copied = type(self)(chat=self._chat)
        copied._parts = self._parts.copy()
        return copied

    def field(self) -> str:
        if self._chat:
            return f'"messages":[{",".join(self._parts)}]'
        return f'"prompt":"{"".join(self._parts)}"'


@dataclass(slots=True)
class Conversation:
    played: PlayedSession
    transcript: Transcript
    at: float  # of the next turn, without its think time
    own: bool = True  # not a sub-agent's
    known: int = 0  # tokens of the transcript, by the server's count
    think_s: float = 0.0  # its own, and that of the sub-agents that it waited for
    pauses_s: list[float] = field(default_factory=list)  # after failures of the whole session

    def fork(self) -> Conversation:
        return replace(self, transcript=self.transcript.copy(), own=False, think_s=0.0)


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
        talk = Conversation(played, Transcript(chat=self._endpoint.path == CHAT), at)
        complete = await self._play_turns(turns, talk)
        played.think_s = talk.think_s
        if complete:
            played.end = self._now()
        return max(talk.pauses_s, default=None)

    async def _play_turns(self, turns: Iterable[PlannedTurn], talk: Conversation) -> bool:
        """Return whether all turns and their sub-agents were answered."""
        for turn in turns:
            if not await self._play_turn(turn, talk):
                return False
            if turn.forks:
                forks = [talk.fork() for _ in turn.forks]
                playing = map(self._play_turns, turn.forks, forks)
                complete = await asyncio.gather(*playing)
                talk.think_s += max(forks, key=lambda fork: fork.at).think_s
                talk.played.sub_agents += sum(complete)
                if not all(complete):
                    return False
                talk.at = self._now()
        return True

    async def _play_turn(self, turn: PlannedTurn, talk: Conversation) -> bool:
        """Send a turn after its think time; return whether it was answered."""
        played = talk.played
        # A plan does not count the template of later messages.
        added = turn.new_tokens + self._endpoint.measure.fixed + turn.request.output_tokens
        if not turn.restarts and talk.known + added > self._limit:
            turn = turn.compacted(self._limit)
        talk.at += turn.think_s
        talk.think_s += turn.think_s
        body = self._body(turn, talk.transcript)  # large: made while the session thinks
        if (early := min(talk.at, self._end) - self._now()) > 0:
            await asyncio.sleep(early)
        if talk.at >= self._end or played.failed:
            return False
        self.cut += turn.cut
        token_events: list[bytes] = []
        context_tokens = turn.request.context_tokens if turn.restarts else talk.known
        request = replace(turn.request, at=talk.at, context_tokens=context_tokens)
        outcome, pause_s = await self._send(request, talk.at, body, token_events)
        if pause_s is not None:
            played.failed = True
            talk.pauses_s.append(pause_s)
            return False
        talk.at = self._now()
        talk.known = outcome.prompt_tokens + outcome.completed
        talk.transcript.extend("assistant", text_of(token_events))
        played.done += talk.own
        return True

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

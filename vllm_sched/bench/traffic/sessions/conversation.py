"""The requests of a session, in advance: sizes and shared prefixes of each turn.

A turn's pieces reach past its prompt into the answer, because the next prompt repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from vllm_sched.bench.traffic.types import Piece, Request, Session


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    request: Request
    think_s: float
    new_tokens: int
    restarts: bool  # the prompt is the shared prefix and the new tokens only
    forks: tuple[tuple[PlannedTurn, ...], ...] = ()
    cut: bool = False  # compacted, because it did not fit the context
    shared: tuple[Piece, ...] = ()  # the shared prefix of its session

    def compacted(self, limit: float) -> PlannedTurn:
        """Return the turn without the conversation; without the prefix too, if that is too long."""
        request, size = self.request, _size(self.shared)
        kept = size + self.new_tokens + request.output_tokens <= limit
        prefix, known = (self.shared, size) if kept else ((), 0)
        compacted = replace(
            request,
            prompt_tokens=known + self.new_tokens,
            shared=(*prefix, request.shared[-1]),
            context_tokens=known,
        )
        return replace(self, request=compacted, restarts=True, cut=True)


def plan_session(begin: Request, limit: float = inf) -> tuple[PlannedTurn, ...]:
    """Return the turns of the session that a request begins, each at most `limit` tokens long."""
    if begin.begins is None:
        return ()
    named = replace(begin, begins=None, session=begin.begins.name)
    return tuple(_planned(begin.begins, named, (), limit))


@dataclass(slots=True)
class _Prompt:
    """The conversation so far: a shared prefix, and the session's own text."""

    root: tuple[Piece, ...]
    own_tokens: int = 0
    restarts: int = 0  # each begins another text

    @property
    def tokens(self) -> int:
        return _size(self.root) + self.own_tokens

    def restart(self, root: tuple[Piece, ...]) -> None:
        self.root, self.own_tokens = root, 0
        self.restarts += 1

    def shrink_turn(self, new: int, output: int, limit: int) -> tuple[int, int]:
        """Return the sizes of a turn that fit, without the prefix if it alone is too long."""
        output = max(1, min(output, limit // 2))
        new = max(1, min(new, limit - output - self.tokens))
        if self.tokens + new + output > limit:
            self.root, new = (), max(1, limit - output)
        return new, output


def _planned(
    session: Session, begin: Request, inherited: tuple[Piece, ...], limit: float
) -> list[PlannedTurn]:
    own_begin = session.fresh or not inherited
    prompt = _Prompt(session.shared if own_begin else inherited)
    context = 0 if own_begin else prompt.tokens
    turns = []
    for number, turn in enumerate(session.turns):
        new, output = turn.new_tokens, turn.output_tokens
        if compacts := turn.compacts and number > 0:
            prompt.restart(session.shared)
        if cut := prompt.tokens + new + output > limit:
            if not compacts:
                prompt.restart(session.shared)
            new, output = prompt.shrink_turn(new, output, int(limit))
        if cut or compacts:
            context = min(context, prompt.tokens)
        restarts = cut or compacts or (own_begin and not number)
        size = prompt.tokens + new
        prompt.own_tokens += new + output
        pieces = (*prompt.root, (f"{session.name}#{prompt.restarts}", prompt.own_tokens))
        request = replace(
            begin,
            prompt_tokens=size,
            output_tokens=output,
            shared=pieces,
            turn=number,
            context_tokens=context,
        )
        forks = tuple(tuple(_planned(fork, begin, pieces, limit)) for fork in turn.forks)
        turns.append(PlannedTurn(request, turn.think_s, new, restarts, forks, cut, session.shared))
        context = size + output
    return turns


def first_request(session: Session, at: float, klass: str, tenant: str = "") -> Request:
    """Return the request that begins a session, as a traffic source yields it."""
    turn = session.turns[0]
    prompt = _size(session.shared) + turn.new_tokens
    return Request(at, klass, prompt, turn.output_tokens, tenant, session.shared, begins=session)


def _size(pieces: tuple[Piece, ...]) -> int:
    return sum(tokens for _, tokens in pieces)

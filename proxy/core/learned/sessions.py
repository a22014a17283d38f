"""Where turns of sessions were served, and what is left of them in caches.

Idea: LRU stack distance. Of a session's last turn, a worker still has its capacity less what was
written to its cache since.

Cost: two look-ups per turn. Memory: 0.5 KB per session.

How it fails: tokens of other clients' requests are not seen. Very many sessions of one tenant make
those of others forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from proxy.core.learned.prefix_index import ENDS

MAX_SESSIONS = 65_536
MAX_IDLE_S = 3600.0
MAX_VISITS = 4  # workers per session
# Of a prompt's end, which a client may change later, such as a mark for caches.
SHORT_PROMPT_BYTES, SHORT_END_BYTES, END_BYTES = 65_536, 2048, 6144


class Turn:
    """A metric label."""

    NEW: Final = "new"  # or another prompt
    STAYED: Final = "stayed"
    MOVED: Final = "moved"  # another worker costs less
    DISPLACED: Final = "displaced"  # its worker is full or down


TURNS = Turn.NEW, Turn.STAYED, Turn.MOVED, Turn.DISPLACED


@dataclass(slots=True, eq=False)
class Visit:
    """A session's last turn on one worker."""

    worker: int  # its index
    since: float  # start of the worker
    tokens: int  # of the prompt and the response
    written: int  # by the worker until then
    # Number and hash of the prompt's blocks before its end.
    depth: int = 0
    mark: int = 0

    def cached_tokens(self, capacity: int, written: int) -> int:
        if not capacity:
            return self.tokens
        return max(min(self.tokens, capacity - (written - self.written)), 0)

    def may_go_on(self, hashes: tuple[int, ...]) -> bool:
        """Return whether a prompt has all of this turn's prompt but its end.

        Conversations with one id, such as an application's `prompt_cache_key`, only begin alike.
        """
        return _may_have(hashes, self.depth, self.mark)


class Session:
    """A conversation: each prompt extends the one before."""

    __slots__ = (
        "depth", "key", "known_as", "mark", "seen_at", "strayed", "tail", "visits",
    )  # fmt: skip

    def __init__(self, key: int, now: float) -> None:
        self.key = key
        self.known_as = key  # to other processes
        self.seen_at = now
        self.visits: list[Visit] = []  # the last at the end
        # Number and hash of the blocks in the first half, and in seven eighths, of the last prompt.
        self.depth = self.mark = 0
        self.tail = (0, 0)
        self.strayed = False  # the last prompt was another, shorter one

    def may_extend(self, hashes: tuple[int, ...]) -> bool:
        return _may_have(hashes, self.depth, self.mark)

    def extends_nearly_all(self, hashes: tuple[int, ...]) -> bool:
        """Return whether a prompt that goes on has nearly all of the last one."""
        return _may_have(hashes, *self.tail)

    def tokens_on(self, worker: int, since: float) -> int:
        tokens = (v.tokens for v in self.visits if v.worker == worker and v.since == since)
        return next(tokens, 0)

    def add_visit(self, visit: Visit) -> None:
        self.visits = [v for v in self.visits if v.worker != visit.worker][1 - MAX_VISITS :]
        self.visits.append(visit)

    def record_prompt(self, hashes: tuple[int, ...], prompt_bytes: int) -> bool:
        """Note the last prompt; return False for a side request, such as one for a title."""
        strays = not self.may_extend(hashes)
        if strays and not self.strayed and len(hashes) < self.depth:
            self.strayed = True
            return False
        self.strayed = False
        if strays:
            self.visits = []
        if hashes:
            self.depth, self.mark = _mark(hashes, prompt_bytes // 2)
            self.tail = _mark(hashes, prompt_bytes - prompt_bytes // 8)
        return True


def _may_have(hashes: tuple[int, ...], depth: int, mark: int) -> bool:
    return not depth or not hashes or (len(hashes) >= depth and hashes[depth - 1] == mark)


def _mark(hashes: tuple[int, ...], prompt_bytes: int) -> tuple[int, int]:
    """Return the number of blocks in the first bytes, and their hash."""
    depth = min(bisect_right(ENDS, prompt_bytes), len(hashes)) or 1
    return depth, hashes[depth - 1]


def end_mark(hashes: tuple[int, ...], prompt_bytes: int) -> tuple[int, int]:
    """Return the number and the hash of the blocks before a prompt's end; zeros if it has none."""
    end_bytes = SHORT_END_BYTES if prompt_bytes <= SHORT_PROMPT_BYTES else END_BYTES
    return _mark(hashes, prompt_bytes - end_bytes) if hashes else (0, 0)


class Sessions:
    """The sessions of all tenants by key, the last used at the end."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self.turns: dict[tuple[str, str], int] = {}  # by model and `Turn`
        # Reports turns to other processes.
        self.report_turn: Callable[[Session, Visit], None] | None = None
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[int, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: int) -> Session | None:
        return self._sessions.get(key)

    def get_or_create(self, key: int, now: float) -> Session:
        sessions = self._sessions
        session = sessions.get(key)
        if session is None:
            self._forget_idle(now)
            session = sessions[key] = Session(key, now)
        else:
            session.seen_at = now
            sessions.move_to_end(key)
        return session

    def rename(self, session: Session, key: int) -> None:
        """Change the key of a session: its last response names it."""
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
        session.key = key
        self._sessions[key] = session

    def record_turn(
        self, session: Session, hashes: tuple[int, ...], prompt_bytes: int, visit: Visit
    ) -> None:
        if not session.record_prompt(hashes, prompt_bytes):
            return
        session.add_visit(visit)
        if self.report_turn is not None:
            self.report_turn(session, visit)

    def count(self, model: str, turn: str) -> None:
        self.turns[model, turn] = self.turns.get((model, turn), 0) + 1

    def _forget_idle(self, now: float) -> None:
        sessions = self._sessions
        while sessions:
            oldest = sessions[next(iter(sessions))]
            if len(sessions) < self._max_sessions and now - oldest.seen_at < MAX_IDLE_S:
                break
            del sessions[oldest.key]

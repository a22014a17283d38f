"""What a plain worker holds: its requests, their room in the cache, and prompts it remembers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from vllm_sched.bench.traffic.types import Piece
    from vllm_sched.sim.types import Job


class Task:
    """A job on a worker."""

    __slots__ = (
        "begins",
        "cached",
        "decodes_from",
        "ends_at",
        "fetching",
        "gone",
        "holds",
        "job",
        "left",
        "long",
        "need",
        "number",
        "own",
        "ready",
        "since",
    )

    def __init__(self, job: Job, number: int, now: float, need: int) -> None:
        self.job = job
        self.number = number
        self.since = now
        self.need = need  # tokens of the cache that it may come to
        self.own = 0  # of those, that are kept for it alone
        self.begins: Sequence[Piece] = ()  # and what it begins with, with others or not
        self.left = job.prompt_tokens  # still to be computed
        self.cached = 0
        self.ready = 0  # the first step that may have it
        self.decodes_from = self.ends_at = 0  # in decode steps of its worker; 0: does not decode
        self.gone = self.holds = self.fetching = self.long = False

    @property
    def done(self) -> int:
        """Tokens of the prompt that are in the cache."""
        return self.job.prompt_tokens - self.left


class CachedPrefixes:
    """Beginnings of prompts that a worker has in its cache, the one used last kept longest.

    And of a prompt its beginning: what follows is of no use without it.
    """

    def __init__(self, tokens: int) -> None:
        self._room = tokens
        self._held: OrderedDict[int | str, int] = OrderedDict()
        self._tokens = 0

    def beginning(self, shared: Sequence[Piece]) -> list[Piece]:
        """Give what is here of a prompt's beginning."""
        found: list[Piece] = []
        for name, tokens in shared:
            if not (have := self._held.get(name, 0)):
                break
            found.append((name, min(have, tokens)))
            if have < tokens:
                break
        return found

    def held(self, shared: Sequence[Piece]) -> int:
        """Count the tokens of a prompt that are here, and keep them for longer."""
        found = 0
        for name, tokens in reversed(self.beginning(shared)):
            self._held.move_to_end(name)
            found += tokens
        return found

    def left(self, name: int | str) -> None:
        """Keep a piece for longer that nobody has any more who runs."""
        if name in self._held:
            self._held.move_to_end(name)

    def keep(self, shared: Sequence[Piece], room: int, running: Container[int | str] = ()) -> None:
        """Remember a prompt that was computed, as far as there is room beside what runs.

        What is `running` stays in any case: those who have it keep it.
        """
        if not self._room:
            return
        held = self._held
        for name, tokens in reversed(shared):
            have = held.get(name, 0)
            if tokens > have:
                held[name] = tokens
                self._tokens += tokens - have
            held.move_to_end(name)
        over = self._tokens - min(max(room, 0), self._room)
        forgotten = []
        for name, tokens in held.items():
            if over <= 0:
                break
            if name not in running:
                forgotten.append(name)
                over -= tokens
        for name in forgotten:
            self._tokens -= held.pop(name)


class KvBlocks:
    """What requests that run take of the cache: what several of them begin with, once.

    From when it is computed: those that compute the same at the same time have it each. Cost: a
    look at each shared piece when a request enters, has its first token, and leaves. How it fails:
    of requests that share unlike parts of a piece the longest part is kept until the last leaves.
    """

    def __init__(self, tokens: int, prefixes: CachedPrefixes) -> None:
        self.tokens = tokens
        self.prefixes = prefixes
        self._own = self._shared = 0
        self._users: dict[int | str, list[int]] = {}  # of a piece, and the tokens of it

    @property
    def used(self) -> int:
        """Tokens that are taken."""
        return self._own + self._shared

    def fits(self, task: Task) -> bool:
        """Whether there is room for all that a request may come to."""
        free = self.tokens - self.used
        if task.need <= free or not self.used:
            return True
        saved = sum(
            min(tokens, self._users[name][1])
            for name, tokens in self.prefixes.beginning(task.job.shared)
            if name in self._users
        )
        return task.need - saved <= free

    def take(self, task: Task) -> None:
        """Keep room for a request."""
        task.begins = self.prefixes.beginning(task.job.shared)
        own = task.need
        for name, tokens in task.begins:
            own -= tokens
            users = self._users.setdefault(name, [0, 0])
            users[0] += 1
            if tokens > users[1]:
                self._shared += tokens - users[1]
                users[1] = tokens
        task.own = max(own, 0)
        self._own += task.own

    def give(self, task: Task) -> None:
        """Let go of what was kept for a request."""
        self._own -= task.own
        for name, _ in reversed(task.begins):
            users = self._users[name]
            users[0] -= 1
            if not users[0]:
                self._shared -= users[1]
                del self._users[name]
                self.prefixes.left(name)
        task.own, task.begins = 0, ()

    def computed(self, task: Task) -> None:
        """Remember a request's prompt: from now on others may begin with it."""
        self.give(task)
        shared = task.job.shared
        alone = max(task.need - sum(tokens for _, tokens in shared), 0)
        self.prefixes.keep(shared, self.tokens - self._own - alone, self._users)
        self.take(task)

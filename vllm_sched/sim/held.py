"""What a plain worker holds: its requests, and what it remembers of prompts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_sched.bench.traffic.types import Piece
    from vllm_sched.sim.types import Job


class Task:
    """A job on a worker."""

    __slots__ = (
        "cached",
        "decodes_from",
        "ends_at",
        "fetching",
        "gone",
        "holds",
        "job",
        "kv",
        "left",
        "long",
        "number",
        "ready",
        "since",
    )

    def __init__(self, job: Job, number: int, now: float, kv: int) -> None:
        self.job = job
        self.number = number
        self.since = now
        self.kv = kv  # tokens of the cache that are kept for it
        self.left = job.prompt_tokens  # still to be computed
        self.cached = 0
        self.ready = 0  # the first step that may have it
        self.decodes_from = self.ends_at = 0  # in decode steps of its worker; 0: does not decode
        self.gone = self.holds = self.fetching = self.long = False

    @property
    def done(self) -> int:
        """Tokens of the prompt that are in the cache."""
        return self.job.prompt_tokens - self.left


class Prefixes:
    """Beginnings of prompts that a worker has in its cache, the one used last kept longest."""

    def __init__(self, tokens: int) -> None:
        self._room = tokens
        self._held: OrderedDict[int | str, int] = OrderedDict()
        self._tokens = 0

    def held(self, shared: Sequence[Piece]) -> int:
        """Count the tokens of a prompt that are here."""
        found = 0
        for name, tokens in shared:
            have = self._held.get(name, 0)
            if have:
                self._held.move_to_end(name)
            found += min(have, tokens)
            if have < tokens:
                break
        return found

    def keep(self, shared: Sequence[Piece], room: int) -> None:
        """Remember a prompt that was computed, as far as there is room beside what runs."""
        if not self._room:
            return
        held = self._held
        for name, tokens in shared:
            have = held.get(name, 0)
            if tokens > have:
                held[name] = tokens
                self._tokens += tokens - have
            held.move_to_end(name)
        most = min(max(room, 0), self._room)
        while held and self._tokens > most:
            self._tokens -= held.popitem(last=False)[1]

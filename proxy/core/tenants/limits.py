"""How much a tenant may ask for: requests and tokens a minute, at once, and in one prompt.

Idea: a bucket that refills at a steady rate and holds a minute's worth (GCRA: all of its state is
one number, the moment at which it will be full again). So any `t` seconds let through at most a
minute's limit and `t` times the rate. What a request will take is estimated when it comes and
corrected when it ends; a bucket may then owe, which time makes good.

Cost: under a microsecond. How it fails: a client that sends its whole minute at once may, having
paused before, have twice the limit within sixty seconds.

The numbers lie in `cells`, which may be any writable sequence of floats: where several processes
share a limit, a part of memory that they share. Clocks must then agree, as the system's monotonic
one does. Two that write at the same moment may lose one of the two; what is in flight can't stand
that, so each counts its own, and `elsewhere` is what the others have.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MINUTE = 60.0
CELLS = 2  # that one tenant's ledger takes
REQUESTS, TOKENS = range(CELLS)
State = tuple[int, int, float]  # the limit, what is left, and the seconds until all of it is
TINY = 1e-6  # seconds, that sums of many small numbers may be off by
AGAIN_S = 1.0  # after which one who has too much in flight may try again: nobody knows better


class Limit(StrEnum):
    """Which limit was met; labels of a metric."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"
    PROMPT = "max_prompt_tokens"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows a tenant; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """A limit that a request does not keep."""

    limit: Limit
    most: int
    retry_after_s: float | None = None  # None: it is no use
    requests: State | None = None
    tokens: State | None = None


class TokenBucket:
    """So much per minute."""

    __slots__ = ("_at", "_cells", "_each_s", "per_minute")

    def __init__(
        self, per_minute: int, cells: MutableSequence[float] | None = None, at: int = 0
    ) -> None:
        self.per_minute = per_minute
        self._each_s = MINUTE / per_minute
        self._cells = array("d", [0.0]) if cells is None else cells
        self._at = at

    def left(self, now: float) -> float:
        """How much may be taken; less than nothing where it owes."""
        return self.per_minute - self.reset_s(now) / self._each_s

    def reset_s(self, now: float) -> float:
        """How long until it is full."""
        return max(self._cells[self._at] - now, 0.0)

    def wait_s(self, now: float, amount: float) -> float:
        """How long until so much could be taken; more than it holds passes when it is full."""
        wait = max(self._cells[self._at] - now, 0.0) + min(amount * self._each_s, MINUTE) - MINUTE
        return wait if wait > TINY else 0.0

    def take(self, now: float, amount: float) -> float:
        """Take so much, or nothing; return how long to wait, 0 if it was taken."""
        wait = self.wait_s(now, amount)
        if not wait:
            self.charge(now, amount)
        return wait

    def charge(self, now: float, amount: float) -> None:
        """Take so much, even if it is not there; give back where it is less than nothing."""
        cells, at = self._cells, self._at
        cells[at] = max(cells[at], now) + amount * self._each_s

    def shown(self, now: float) -> State:
        """Tell how it stands."""
        return self.per_minute, max(int(self.left(now)), 0), self.reset_s(now)


class RemoteUsage(Protocol):
    """Other processes, which count for the same limit."""

    def running(self) -> int:
        """Say how many they have in flight at this moment."""

    def told(self, running: int) -> None:
        """Hear how many this one has."""


class TenantUsage:
    """What one tenant has taken, and has in flight."""

    __slots__ = (
        "_cells",
        "_held",
        "_limits",
        "_requests",
        "_tokens",
        "elsewhere",
        "others",
        "running",
    )

    def __init__(self, limits: Limits, cells: MutableSequence[float] | None = None) -> None:
        self.running = 0  # in flight and waiting, in this process
        self.elsewhere = 0  # the same in others, as far as they have told
        self.others: RemoteUsage | None = None
        self._held = 0  # places of those that leave, and enter again at once
        self._cells = array("d", [0.0] * CELLS) if cells is None else cells
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """Take other limits; of what was taken, as many seconds stay to be waited for."""
        self._limits = limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = None if requests is None else TokenBucket(requests, self._cells, REQUESTS)
        self._tokens = None if tokens is None else TokenBucket(tokens, self._cells, TOKENS)

    def share(self, cells: MutableSequence[float]) -> None:
        """Go on with numbers that lie elsewhere."""
        for at, number in enumerate(self._cells):
            cells[at] = max(cells[at], number)
        self._cells = cells
        self.limit(self._limits)

    def enter(self, now: float, tokens: int, prompt: int) -> LimitExceeded | None:
        """Let a request in, or say which limit keeps it out; then nothing was taken.

        But for a prompt that is too long: it takes a request, for it was read. `prompt` is the
        least that the largest one may have.
        """
        if (breach := self.too_long(prompt)) is not None:
            self.was_read(now)
            return breach
        most = self._limits.concurrency
        others = None if most is None else self.others
        if others is not None:
            # Of a crowd each process has a part. Whoever would enter says so before it looks: of
            # two at the same moment neither passes unseen, though both may find no room.
            others.told(self.running + 1)
            self.elsewhere = others.running()
        if most is not None and self.running + self.elsewhere >= most:
            breach = self._breach(now, Limit.CONCURRENCY, most, AGAIN_S)
        else:
            breach = self._take(now, tokens)
        if breach is None:
            self.running += 1
        elif others is not None:
            others.told(self.running)
        return breach

    def spent(self, now: float) -> LimitExceeded | None:
        """Say which limit would keep out whatever came now; nothing is taken."""
        most, others, requests, bucket = (
            self._limits.concurrency, self.others, self._requests, self._tokens,
        )  # fmt: skip
        if most is not None:
            elsewhere = self.elsewhere if others is None else others.running()
            if self.running + elsewhere >= most:
                return self._breach(now, Limit.CONCURRENCY, most, AGAIN_S)
        if requests is not None and (wait := requests.wait_s(now, 1)) > 0:
            return self._breach(now, Limit.REQUESTS, requests.per_minute, wait)
        if bucket is not None and (wait := bucket.wait_s(now, 0)) > 0:
            return self._breach(now, Limit.TOKENS, bucket.per_minute, wait)
        return None

    def was_read(self, now: float) -> None:
        """Take a request for one that was read, and came to nothing by what it is."""
        if self._requests is not None:
            self._requests.charge(now, 1)

    def _take(self, now: float, tokens: int) -> LimitExceeded | None:
        """Take what a request will have a minute, or say what keeps it out."""
        requests, bucket = self._requests, self._tokens
        # Both are asked before either is taken from.
        if requests is not None and (wait := requests.wait_s(now, 1)) > 0:
            return self._breach(now, Limit.REQUESTS, requests.per_minute, wait)
        if bucket is not None and (wait := bucket.take(now, tokens)) > 0:
            return self._breach(now, Limit.TOKENS, bucket.per_minute, wait)
        if requests is not None:
            requests.charge(now, 1)
        return None

    def _count(self, more: int) -> None:
        self.running += more
        if self.others is not None and self._limits.concurrency is not None:
            self.others.told(self.running + self._held)

    def too_long(self, prompt: int) -> LimitExceeded | None:
        """Say whether a prompt that has at least so many tokens may have as many."""
        most = self._limits.max_prompt_tokens
        return LimitExceeded(Limit.PROMPT, most) if most is not None and prompt > most else None

    def _breach(self, now: float, limit: Limit, most: int, wait: float) -> LimitExceeded:
        requests, tokens = self.left(now)
        return LimitExceeded(limit, most, wait, requests, tokens)

    def left(self, now: float) -> tuple[State | None, State | None]:
        """Tell how requests and tokens stand."""
        requests, tokens = self._requests, self._tokens
        return (
            None if requests is None else requests.shown(now),
            None if tokens is None else tokens.shown(now),
        )

    def enter_again(self, now: float, tokens: int) -> None:
        """Let one in that was in before: another worker is to try."""
        self._held = 0
        self._count(1)
        if self._tokens is not None:
            self._tokens.charge(now, tokens)

    def hold(self) -> None:
        """Keep the place of one that leaves now and may enter again: no other process has it."""
        self._held = 1

    def let_go(self) -> None:
        """Keep it no longer, where nobody entered again."""
        if self._held:
            self._held = 0
            self._count(0)

    def leave(self, now: float, taken: int, used: int) -> None:
        """Let one out: of the tokens taken for it, so many were used."""
        self._count(-1)
        if self._tokens is not None and taken != used:
            self._tokens.charge(now, used - taken)

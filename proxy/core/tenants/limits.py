"""Tenant limits: requests and tokens per minute, concurrency, prompt size.

Idea: a GCRA bucket holds one minute's limit. Its state is the time at which it will be full.
Requests are charged by estimate and corrected at their end.

Cost: under a microsecond.

How it fails: a burst after a pause may take twice the limit.

Processes share `cells` and a monotonic clock. Concurrent writes may lose an update, so each process
counts its own requests in flight.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

MINUTE = 60.0
CELLS_PER_TENANT = 2
REQUESTS, TOKENS = range(CELLS_PER_TENANT)
ROUNDING_S = 1e-6
CONCURRENCY_RETRY_S = 1.0


class BucketState(NamedTuple):
    limit: int
    remaining: int
    reset_s: float  # until the bucket is full


class Limit(StrEnum):
    """A metric label."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"
    PROMPT = "max_prompt_tokens"


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    limit: Limit
    allowed: int
    retry_after_s: float | None = None  # None: never
    requests: BucketState | None = None
    tokens: BucketState | None = None


class TokenBucket:
    def __init__(
        self,
        per_minute: int,
        cells: MutableSequence[float] | None = None,
        at: int = 0,
        parts: int = 1,
    ) -> None:
        """Create a bucket; it has one of `parts` equal parts of the limit."""
        self.per_minute = per_minute
        self._unit_s = MINUTE * parts / per_minute
        self._cells = array("d", [0.0]) if cells is None else cells
        self._at = at

    def remaining(self, now: float) -> float:
        """Return the rest; may be negative."""
        return self.per_minute - self.reset_s(now) / self._unit_s

    def reset_s(self, now: float) -> float:
        return max(self._cells[self._at] - now, 0.0)

    def wait_s(self, now: float, amount: float) -> float:
        """Return the time until available; larger amounts need a full bucket."""
        wait = max(self._cells[self._at] - now, 0.0) + min(amount * self._unit_s, MINUTE) - MINUTE
        return wait if wait > ROUNDING_S else 0.0

    def charge(self, now: float, amount: float) -> None:
        """Take or return an amount unconditionally."""
        cells, at = self._cells, self._at
        cells[at] = max(cells[at], now) + amount * self._unit_s

    def state(self, now: float) -> BucketState:
        remaining = max(int(self.remaining(now)), 0)
        return BucketState(self.per_minute, remaining, self.reset_s(now))


class RemoteUsage(Protocol):
    def running(self) -> int:
        """Return their requests in flight."""

    def publish(self, running: int) -> None:
        """Publish this process's number."""


Decided = Callable[[LimitExceeded | None], None]


class PendingDecision(Protocol):
    """A request that waits for a decision."""

    def drop(self) -> None:
        """Return what the decision takes: the client has left."""


class RemoteLimits(Protocol):
    """A tenant's limits as decided for all hosts together."""

    @property
    def is_fresh(self) -> bool:
        """Whether the reported state is new."""

    def take_from_advance(self, tokens: int) -> bool:
        """Admit a request from what is charged in advance; False if that is not enough."""

    def request_decision(self, tokens: int, on_decided: Decided) -> PendingDecision | None:
        """Have the server decide a request; None if this host decides."""

    def charge(self, requests: int, tokens: int, *, soon: bool) -> None:
        """Report a charge; `soon`: others may wait for it."""


class TenantUsage:
    def __init__(self, limits: Limits) -> None:
        self.running = 0  # includes queued ones
        self.running_elsewhere = 0  # in other processes
        self.remote_usage: RemoteUsage | None = None
        self.remote_limits: RemoteLimits | None = None  # decides for all hosts
        self._parts = 1
        self._kept_places = 0  # places kept for retries
        self._cells: MutableSequence[float] = array("d", [0.0] * CELLS_PER_TENANT)
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        """Set the limits, keeping debts in seconds."""
        self._limits = limits
        requests, tokens, concurrency = (
            limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency,
        )  # fmt: skip
        cells, parts = self._cells, self._parts
        self._requests = None if requests is None else TokenBucket(requests, cells, REQUESTS, parts)
        self._tokens = None if tokens is None else TokenBucket(tokens, cells, TOKENS, parts)
        self._concurrency = None if concurrency is None else -(-concurrency // parts)

    def divide(self, parts: int) -> None:
        """Apply one of some equal parts of each limit; other hosts have the others."""
        if parts != self._parts:
            self._parts = parts
            self.running_elsewhere = 0  # other hosts have their own parts
            self.set_limits(self._limits)

    @property
    def is_divided(self) -> bool:
        return self._parts > 1

    @property
    def is_limited(self) -> bool:
        """Whether other processes' requests matter: a shared limit applies."""
        return not (self._requests is None and self._tokens is None and self._concurrency is None)

    def apply_reported(
        self, requests_full_at: float, tokens_full_at: float, elsewhere: int
    ) -> None:
        self._cells[REQUESTS], self._cells[TOKENS] = requests_full_at, tokens_full_at
        self.running_elsewhere = elsewhere

    def charge_known(self, now: float, requests: int, tokens: int) -> None:
        """Charge what is reported already; negative: not used yet."""
        if self._requests is not None:
            self._requests.charge(now, requests)
        if self._tokens is not None:
            self._tokens.charge(now, tokens)

    def enter_decided(self, exceeded: LimitExceeded | None) -> LimitExceeded | None:
        """Admit a request as decided for all hosts."""
        if exceeded is None:
            self._add_running(1)
        return exceeded

    def exceeded_on_server(self, now: float, limit: Limit, wait_s: float) -> LimitExceeded:
        limits = self._limits
        allowed = {
            Limit.REQUESTS: limits.requests_per_minute,
            Limit.TOKENS: limits.tokens_per_minute,
            Limit.CONCURRENCY: limits.concurrency,
        }[limit]
        return self._exceeded(now, limit, allowed or 0, wait_s)

    def _report(self, requests: int, tokens: int, *, soon: bool = False) -> None:
        if self.remote_limits is not None:
            self.remote_limits.charge(requests, tokens, soon=soon)

    def use_shared_cells(self, cells: MutableSequence[float]) -> None:
        for at, number in enumerate(self._cells):
            cells[at] = max(cells[at], number)
        self._cells = cells
        self.set_limits(self._limits)

    def enter(self, now: float, tokens: int, prompt: int) -> LimitExceeded | None:
        """Admit a request, or return the exceeded limit.

        Too long prompts cost a request, because they were read. `prompt`: its least size.
        """
        if (exceeded := self.too_long(prompt)) is not None:
            self.charge_read(now)
            return exceeded
        others = None if self._concurrency is None else self.remote_usage
        if others is not None:
            # Publish first: two concurrent processes see each other, though both may fail.
            others.publish(self.running + 1)
            self.running_elsewhere = others.running()
        exceeded = self.decide(now, tokens)
        if exceeded is None:
            self.running += 1
        elif others is not None:
            others.publish(self.running)
        return exceeded

    def spent_limit(self, now: float) -> LimitExceeded | None:
        """Return the limit that refuses every request now."""
        if self.remote_limits is not None and not (self.is_limited and self.remote_limits.is_fresh):
            return None
        others = None if self._concurrency is None else self.remote_usage
        return self._find_exceeded(
            now, self.running_elsewhere if others is None else others.running(), 0
        )

    def charge_read(self, now: float) -> None:
        if self._requests is not None:
            self._requests.charge(now, 1)
            self._report(1, 0)

    def decide(self, now: float, tokens: int) -> LimitExceeded | None:
        """Charge a request to the buckets, or return the exceeded limit."""
        if (exceeded := self._find_exceeded(now, self.running_elsewhere, tokens)) is not None:
            return exceeded
        self.charge_known(now, 1, tokens)
        if self._requests is not None or self._tokens is not None:
            self._report(1, tokens)
        return None

    def _find_exceeded(self, now: float, elsewhere: int, tokens: int) -> LimitExceeded | None:
        concurrency, requests, bucket = self._concurrency, self._requests, self._tokens
        if concurrency is not None and self.running + elsewhere >= concurrency:
            return self._exceeded(now, Limit.CONCURRENCY, concurrency, CONCURRENCY_RETRY_S)
        if requests is not None and (wait := requests.wait_s(now, 1)) > 0:
            return self._exceeded(now, Limit.REQUESTS, requests.per_minute, wait)
        if bucket is not None and (wait := bucket.wait_s(now, tokens)) > 0:
            return self._exceeded(now, Limit.TOKENS, bucket.per_minute, wait)
        return None

    def _add_running(self, more: int) -> None:
        self.running += more
        if self.remote_usage is not None and self._concurrency is not None:
            self.remote_usage.publish(self.running + self._kept_places)

    def too_long(self, prompt: int) -> LimitExceeded | None:
        limit = self._limits.max_prompt_tokens
        return LimitExceeded(Limit.PROMPT, limit) if limit is not None and prompt > limit else None

    def _exceeded(self, now: float, limit: Limit, allowed: int, wait: float) -> LimitExceeded:
        requests, tokens = self.remaining(now)
        return LimitExceeded(limit, allowed, wait, requests, tokens)

    def remaining(self, now: float) -> tuple[BucketState | None, BucketState | None]:
        requests, tokens = self._requests, self._tokens
        return (
            None if requests is None else requests.state(now),
            None if tokens is None else tokens.state(now),
        )

    def enter_again(self, now: float, tokens: int) -> None:
        self._kept_places = 0
        self._add_running(1)
        if self._tokens is not None:
            self._tokens.charge(now, tokens)
        if self.is_limited:
            self._report(0, tokens)

    def keep_place(self) -> None:
        self._kept_places = 1

    def release_place(self) -> None:
        if self._kept_places:
            self._kept_places = 0
            self._add_running(0)

    def leave(self, now: float, taken: int, used: int) -> None:
        self._add_running(-1)
        if self._tokens is not None and taken != used:
            self._tokens.charge(now, used - taken)
        if self.is_limited:
            self._report(0, used - taken, soon=self._concurrency is not None)

    def refund(self, now: float, tokens: int) -> None:
        """Return what was taken for a request that did not enter."""
        self.charge_known(now, -1, -tokens)
        self._report(-1, -tokens, soon=True)

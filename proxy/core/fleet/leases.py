"""A routing decision, the attempts before it, and the lease with its charges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from proxy.core.fleet.worker import Worker
from proxy.core.learned.latency import PrefillWork
from proxy.core.learned.prefix_tree import PrefixNode
from proxy.core.learned.sessions import Session
from proxy.core.model.specs import Score
from proxy.core.model.types import Outcome, Reason, RequestInfo

NO_WORKERS: frozenset[Worker] = frozenset()
PAUSE_S = 1.0  # before a stream returns to a worker that failed it
RETRY_PAUSE_S = 0.1  # after a drop: other workers may be failing too
ERRED = Outcome.ERRED
PASSING = Outcome.FAILED, Outcome.BUSY  # the worker may be well again soon


@dataclass(slots=True, frozen=True)
class LegFailure:
    """Why a request leaves its worker for another one."""

    outcome: Outcome
    avoid: Worker | None  # the worker that failed; None if the request only moves
    retry_after_s: float | None = None  # of the worker's response
    free: bool = False  # the retry is no attempt and needs no budget
    dropped: bool = False  # the connection closed before any response
    why: str = ""  # an HTTP status or an error's name


@dataclass(slots=True, frozen=True)
class Attempts:
    """What earlier attempts of a request have shown."""

    tried: frozenset[Worker] = NO_WORKERS  # workers that failed it
    paused: frozenset[Worker] = NO_WORKERS  # may get a stream again after a pause
    paused_until: float = 0.0
    failing_since: float = 0.0  # first failure of the paused workers
    failures: int = 0  # attempts used
    unpaid: bool = False  # its retry waits for the budget
    erred_on: tuple[str, ...] = ()  # workers that responded with 500
    drops: int = 0  # connections closed before any response
    retry_at: float = 0.0
    why_whole: str = ""  # why it can be split no more
    enlarged: RequestInfo | None = None  # once a worker was too small
    moved: bool = False  # off a worker that had not failed it
    continues: bool = False  # with the output so far
    any_worker: bool = False  # may continue it: the output so far is text, or nothing

    @property
    def is_retry(self) -> bool:
        return bool(self.failures or self.moved or self.tried or self.paused)

    @property
    def failed_on(self) -> frozenset[Worker]:
        return self.tried | self.paused

    def may_try(self, worker: Worker) -> bool:
        """Return whether a worker may be tried, now or later."""
        takes_output = worker.can_continue or self.any_worker or not self.continues
        return takes_output and worker not in self.tried

    def may_try_now(self, worker: Worker, now: float) -> bool:
        return self.may_try(worker) and (worker not in self.paused or now >= self.paused_until)

    def after(self, failure: LegFailure, leg: Worker, now: float) -> Attempts:
        worker, attempts = failure.avoid, self
        if failure.outcome is ERRED:
            attempts = replace(attempts, erred_on=(*self.erred_on, leg.name))
        if worker is None:
            return replace(attempts, moved=True)
        if failure.dropped:
            attempts = replace(attempts, drops=self.drops + 1, retry_at=now + RETRY_PAUSE_S)
        if not failure.free:
            attempts = replace(attempts, failures=self.failures + 1)
        if not (self.continues and failure.outcome in PASSING):
            return replace(attempts, tried=self.tried | {worker})
        return replace(
            attempts,
            paused=self.paused | {worker},
            paused_until=now + PAUSE_S,
            failing_since=self.failing_since if self.paused else now,
        )


FIRST_ATTEMPT: Final = Attempts()


@dataclass(slots=True)
class HandoverDecision:
    prefill: Worker  # the decision's worker decodes
    cached_tokens: int  # on the prefill worker
    tokens: int  # to transfer; 0 if there is nothing to transfer
    prefill_s: float  # predicted
    transfer_s: float
    transferred_s: float | None = None  # observed, of a stream


@dataclass(slots=True)
class Decision:
    worker: Worker
    reason: Reason
    predicted_ttft_s: float | None = None
    scores: tuple[Score, ...] = ()  # kept on request only
    cached_tokens: int = 0  # expected on the worker
    handover: HandoverDecision | None = None
    verdict: str = ""  # why it is handed over or not
    why_whole: str = ""  # why this and later attempts do not split it
    turn: str = ""  # of its session

    @property
    def route(self) -> str:
        """Return `w0`, or `p0>d0` for a hand-over."""
        handover = self.handover
        name = self.worker.name
        return name if handover is None else f"{handover.prefill.name}>{name}"


@dataclass(slots=True, frozen=True)
class CacheWait:
    """A wait for a slot of the full worker that has a prompt's cache."""

    worker: Worker
    seconds: float  # predicted
    until: float  # the longest
    others_late: bool  # no other worker is in time
    placed_elsewhere: int  # requests that other processes had placed on the worker


class Lease:
    """A worker's capacity, charged for one request until released.

    A hand-over's lease is on the decode worker, and holds the prefill worker's. No dataclass: its
    `__init__` would not be compiled.
    """

    ahead_tokens: float = 0.0  # prefill tokens ahead, estimated
    ahead_long_tokens: float = 0.0  # those of long requests ahead of a short one
    trial: bool = False  # sent on trial to an open breaker
    decoding_before: int = 0  # samples decoding at the first token
    seen_tokens: int = 0  # of all samples
    first_token_at: float | None = None
    begun_at: float | None = None  # first byte of a tenant's response
    released: bool = False
    num_decoding: int = 0  # samples counted as decoding
    kv_coming: int = 0  # cache tokens charged until the first token
    holds: PrefixNode | None = None  # end of the prompt in `Worker.running_prefixes`
    prefill: Lease | None = None  # prefill leg of a hand-over
    sent: bool = True  # False on a decode worker until the prefill is done
    holds_blocks: bool = False  # on the prefill worker
    session: Session | None = None

    def __init__(
        self,
        info: RequestInfo,
        attempts: Attempts,
        decision: Decision,
        worker: Worker,
        charged_at: float,
        prefill_tokens: int,
        decode_tokens: int,
    ) -> None:
        self.info = info
        self.attempts = attempts
        self.decision = decision
        self.worker = worker
        self.charged_at = charged_at
        self.prefill_tokens = prefill_tokens  # 0 after the first token
        self.decode_tokens = decode_tokens  # output to come
        self.kv_tokens = info.prompt_tokens + decode_tokens  # less the shared part

    @property
    def running_leg(self) -> Lease:
        prefill_leg = self.prefill
        return self if prefill_leg is None or prefill_leg.released else prefill_leg

    def prefill_work(self, cached_tokens: int) -> PrefillWork:
        tokens = self.ahead_tokens + self.info.prompt_tokens - cached_tokens
        return PrefillWork(tokens, self.ahead_long_tokens, cached_tokens)

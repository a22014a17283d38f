"""One worker as the router sees it: spec, health, and charges."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import inf

from proxy.core.fleet.breaker import Breaker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.core.learned.latency import LatencyModel
from proxy.core.learned.prefix_tree import PrefixTree
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.model.types import RequestInfo
from proxy.errors import short_list

# Least share of the wait while a prefill is overdue.
MIN_WAIT_SHARE = 0.2
PREFILL_STALL_SHARE = 0.3  # share of a prefill's time that decoding loses
NO_LIMIT = sys.maxsize
MAX_NAMED_MODELS = 3  # in `not_served_because`
KV_OVERBOOKING = 2
MAX_IDLE_PAGE_S = 30.0  # longer than most prefills
# For shorts and longs, at equal costs.
MISFIT = {Role.SHORT: (0, 2), Role.LONG: (2, 0)}
# Tokens and worker masks, descending.
PrefixHolders = list[tuple[int, int]]
# Loaded model, and base model of an adapter.
Origin = tuple[str | None, str | None]


MAX_UNRANKED = 32  # largest group looked at whole
MAX_LOOKED_AT = 8  # of a larger group


@dataclass(slots=True, eq=False, repr=False)
class Worker:
    """A worker. Only the fleet changes it."""

    spec: WorkerSpec
    index: int  # bit in the prefix index, reused after removal
    bit: int = field(init=False)
    name: str = field(init=False)
    role: Role = field(init=False)
    misfit_short: int = field(init=False)
    misfit_long: int = field(init=False)
    request_limit: int = field(init=False)  # less `reserved`
    reserved: int = 0  # of its slots, for routers on other hosts
    reported_max_model_len: int | None = None  # from /v1/models
    max_model_len: int | None = field(init=False)
    models: tuple[str, ...] = field(init=False)
    origins: dict[str, Origin] = field(default_factory=dict)  # of `models`

    awaited_since: float = 0.0  # when the wait for its model list began; -inf: no wait
    up: bool = False
    up_since: float = 0.0  # or restarted
    probed: bool = False  # any probe ended
    probe_error: str = ""  # of the last failed probe
    draining: bool = False
    good_probes: int = 0  # in a row
    failed_probes: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    in_panic: bool = False  # its breaker is ignored
    pace: LatencyModel = field(default_factory=LatencyModel)
    gauges: Gauges | None = None
    kv_capacity: int = 0  # 0: unknown
    foreign_requests: int = 0  # other clients' requests
    foreign_requests_before: int = 0
    # Prefill tokens of foreign requests, if reported.
    foreign_tokens: float = 0.0
    foreign_tokens_before: float = 0.0
    foreign_long_tokens: float = 0.0
    reports_cache: bool = False
    reports_prefixes: bool = False  # its journal is read
    queued: int = 0  # on the worker
    queued_before: int = 0
    learned_slots: float = inf  # from its queue

    requests: int = 0
    sequences: int = 0  # prompts times samples
    prefill_tokens: int = 0  # before the first token
    long_tokens: int = 0  # the part of `prefill_tokens` in long requests
    decode_tokens: int = 0  # output to come
    kv_tokens: int = 0  # cached or promised
    kv_coming: int = 0  # before the first token
    kv_overcharged: int = 0  # charged but not held; negative: held but not charged
    kv_uncharged: int = 0  # beyond the charges
    running_prefixes: PrefixTree = field(default_factory=PrefixTree)  # prefixes of its requests
    kv_unshared: float = 0.0  # learned share of prefixes that is not shared
    unfetched_handovers: int = 0
    num_decoding: int = 0  # samples after the first token
    total_written: int = 0  # tokens, to its cache
    total_placed: int = 0  # requests
    worked_at: float = -inf  # when its page last showed progress
    free_at: float = 0.0  # when its prefills are done
    due_at: float = 0.0  # next progress is due
    remote_load: WorkerLoad = NO_LOAD  # by other processes, included above
    inherited: WorkerLoad = NO_LOAD  # by its predecessor, included above
    successor: Worker | None = None  # new worker at its address after removal

    flat_price: float = field(init=False)
    prompt_price: float = field(init=False)
    output_price: float = field(init=False)
    cached_price: float = field(init=False)

    last_used: int = 0  # number of its last request
    unavailable: bool = False  # full or barred
    ranked_in: tuple[Group, ...] = ()
    rank_key: float = 0.0  # sort key in groups

    def __post_init__(self) -> None:
        self.bit, self.name, self.models = 1 << self.index, self.spec.name, (self.spec.model,)
        self.respecify(self.spec)
        self.reprice()

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.role} {self.requests} requests>"

    def respecify(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.role = spec.role
        self.misfit_short, self.misfit_long = MISFIT.get(spec.role, (1, 1))
        self.reserve(self.reserved)
        lengths = [length for length in (spec.max_model_len, self.reported_max_model_len) if length]
        self.max_model_len = min(lengths, default=None)

    def reserve(self, slots: int) -> None:
        """Leave some of the allowed requests to routers on other hosts."""
        self.reserved, limit = slots, self.spec.max_requests
        self.request_limit = NO_LIMIT if limit is None else max(limit - slots, 0)

    def matches(self, spec: WorkerSpec) -> bool:
        """Return whether the address and model are the same."""
        return (spec.url, spec.model) == (self.url, self.model)

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def model(self) -> str:
        return self.spec.model

    @property
    def lacks_model(self) -> bool:
        return self.spec.model not in self.models

    @property
    def not_served_because(self) -> str:
        """Return why its model is not served; empty if it is."""
        if self.up and self.lacks_model:
            return f"serves {short_list(self.models, MAX_NAMED_MODELS)}, not {self.spec.model}"
        return "" if self.up else self.probe_error

    @property
    def max_requests(self) -> int | None:
        return self.spec.max_requests

    def shows_progress(self, now: float) -> bool:
        """Return whether its page showed progress lately.

        An engine may hang under a server that still answers probes.
        """
        return self.up and now - self.worked_at <= MAX_IDLE_PAGE_S

    @property
    def can_continue(self) -> bool:
        """Return whether it can continue streams of others: it has a journal."""
        return self.reports_prefixes or bool(self.spec.journal)

    @property
    def is_live(self) -> bool:
        """Return whether it may decode."""
        return self.up and not self.draining and self.role.can_serve

    @property
    def can_prefill(self) -> bool:
        return self.up and not self.draining and self.role is Role.PREFILL

    @property
    def context_limit(self) -> int:
        return self.max_model_len or NO_LIMIT

    @property
    def is_full(self) -> bool:
        """Return whether it has all requests allowed.

        By default twice the KV cache: its queue is never empty, and other requests can still go
        elsewhere.
        """
        if self.requests >= self.request_limit:
            return True
        room = self.kv_capacity
        return self.request_limit is NO_LIMIT and 0 < KV_OVERBOOKING * room <= self.kv_held

    @property
    def kv_held(self) -> int:
        return max(self.kv_tokens - self.kv_overcharged, self.kv_coming)

    @property
    def is_barred(self) -> bool:
        """Return whether only trials pass."""
        breaker = self.breaker
        return not breaker.closed and (breaker.busy or not self.in_panic)

    def may_send(self, now: float) -> bool:
        return not self.is_barred or self.breaker.may_send(now)

    def accepts(self, now: float) -> bool:
        return not self.unavailable or (not self.is_full and self.may_send(now))

    def may_fit(self, info: RequestInfo) -> bool:
        """Return whether the low estimate fits."""
        return info.needed_context - info.prompt_error <= self.context_limit

    def surely_fits(self, info: RequestInfo) -> bool:
        """Return whether the high estimate fits."""
        return info.needed_context + info.prompt_error <= self.context_limit

    def cached_tokens(self, prefixes: PrefixHolders) -> int:
        for tokens, holders in prefixes:
            if holders & self.bit:
                return tokens
        return 0

    def reprice(self) -> None:
        """Update the cost of a token in seconds, including delays to decoding requests."""
        pace, others = self.pace, self.num_decoding + self.foreign_requests
        self.flat_price = pace.fixed_s
        self.prompt_price = pace.token_s * (1.0 + PREFILL_STALL_SHARE * others)
        self.output_price = pace.sequence_s * others
        self.cached_price = self.prompt_price * (1.0 - pace.evicted_share)

    def ttft_s(self, info: RequestInfo, now: float, cached: int) -> float:
        wait = self.wait_s(now, for_long=info.long)
        return wait + self.pace.first_token_s(info.prompt_tokens - cached, 0.0, cached)

    def wait_s(self, now: float, *, for_long: bool) -> float:
        """Predict the delay by earlier prefills.

        An overdue prefill is assumed to take as long again: the worker may hang.
        """
        pace = self.pace
        foreign = self.foreign_tokens
        if foreign and not for_long:
            foreign -= (1.0 - pace.long_share) * self.foreign_long_tokens
        if not self.prefill_tokens:
            return pace.token_s * foreign
        longest = pace.token_s * self.prefill_tokens
        wait = self.free_at - now
        if wait > longest:
            wait = longest
        elif wait < longest * MIN_WAIT_SHARE:
            wait = longest * MIN_WAIT_SHARE
        if self.long_tokens and not for_long:
            wait -= wait * (1.0 - pace.long_share) * self.long_tokens / self.prefill_tokens
        if now > self.due_at:
            wait += now - self.due_at
        return wait + pace.token_s * foreign

    def note_progress(self, now: float) -> None:
        pace = self.pace
        tokens = self.prefill_tokens + self.foreign_tokens
        self.due_at = now + pace.fixed_s + pace.token_s * tokens
        if self.successor is not None:
            self.successor.note_progress(now)


class Group:
    """Live workers of one role and context length."""

    __slots__ = ("context_limit", "ranked", "role", "workers")

    def __init__(self, role: Role, context_limit: int, workers: list[Worker]) -> None:
        self.role = role
        self.context_limit = context_limit
        self.workers = workers
        self.ranked: list[tuple[float, int, Worker]] = []
        if len(workers) > MAX_UNRANKED:
            self.ranked = sorted((w.rank_key, w.index, w) for w in workers)

    def drop(self, worker: Worker) -> None:
        del self.ranked[bisect_left(self.ranked, (worker.rank_key, worker.index))]

    def put(self, worker: Worker) -> None:
        insort(self.ranked, (worker.rank_key, worker.index, worker))

    def candidates(self) -> list[Worker]:
        if not self.ranked:
            return [w for w in self.workers if not w.unavailable]
        return [w for _, _, w in self.ranked[:MAX_LOOKED_AT] if not w.unavailable]

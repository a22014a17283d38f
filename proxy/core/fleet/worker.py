"""One worker as the router sees it: its spec, its health, and its charges."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from math import inf

from proxy.core.fleet.breaker import Breaker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.core.learned.latency import LatencyModel
from proxy.core.learned.prefix_tree import PrefixTree
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.model.types import RequestInfo
from proxy.errors import a_few

# Share of the predicted wait that remains while a prefill is overdue: it still runs.
LEAST_WAIT_SHARE = 0.2
STALL = 0.3  # share of a prefill's time that decoding requests lose
NO_LIMIT = sys.maxsize
FEW = 3  # models named in `why`
OVERBOOKED = 2
WORKS_S = 30.0  # seconds without progress: longer than a step and than most prefills
# Misfit of a role for shorts and longs: the tie-break for equal costs.
MISFIT = {Role.SHORT: (0, 2), Role.LONG: (2, 0)}
# Tokens of a prompt, and the mask of the workers that hold them, descending.
Held = list[tuple[int, int]]
# The loaded model, and the base model of an adapter.
Origin = tuple[str | None, str | None]


MAX_UNRANKED = 32  # a decision looks at a whole group up to this size
MAX_LOOKED_AT = 8  # workers of a larger group that a decision looks at


class Worker:
    """A worker. Only the fleet changes it."""

    __slots__ = (
        "awaited_since",
        "bit",
        "breaker",
        "cached_price",
        "decode_tokens",
        "decoding",
        "draining",
        "due_at",
        "elsewhere",
        "failed_probes",
        "flat_price",
        "free_at",
        "gauges",
        "good_probes",
        "heir",
        "in_panic",
        "index",
        "inherited",
        "key",
        "kv_apart",
        "kv_capacity",
        "kv_coming",
        "kv_more",
        "kv_spare",
        "kv_tokens",
        "long_tokens",
        "max_model_len",
        "misfit_long",
        "misfit_short",
        "models",
        "most",
        "name",
        "origins",
        "output_price",
        "pace",
        "pinned",
        "prefill_tokens",
        "probed",
        "prompt_price",
        "queued",
        "queued_before",
        "ranked_in",
        "reports_cache",
        "requests",
        "role",
        "seats",
        "sequences",
        "served",
        "shut",
        "spec",
        "stems",
        "strange_long",
        "strange_tokens",
        "strange_tokens_before",
        "strangers",
        "strangers_before",
        "told_max_model_len",
        "trouble",
        "up",
        "up_since",
        "worked_at",
        "written",
    )

    def __init__(self, spec: WorkerSpec, index: int) -> None:
        self.index = index  # bit in the prefix index; reused after removal
        self.bit = 1 << index
        self.name = spec.name
        self.told_max_model_len: int | None = None  # from /v1/models
        self.respecify(spec)
        self.models: tuple[str, ...] = (spec.model,)
        self.origins: dict[str, Origin] = {}  # known origins of `models`

        self.awaited_since = 0.0  # wait for its first model list since; -inf: no wait
        self.up = False
        self.up_since = 0.0  # when it last came up or restarted
        self.probed = False  # False until the first probe ends
        self.trouble = ""  # error of the last failed probe
        self.draining = False
        self.good_probes = self.failed_probes = 0  # in a row
        self.breaker = Breaker()
        self.in_panic = False  # whether its breaker is ignored: see `ejection`
        self.pace = LatencyModel()
        self.gauges: Gauges | None = None
        self.kv_capacity = 0  # tokens; 0 = unknown
        self.strangers = self.strangers_before = 0  # other clients' requests
        # Their prefill tokens, if known; of these, the longs'.
        self.strange_tokens = self.strange_tokens_before = self.strange_long = 0.0
        self.reports_cache = False
        self.queued = self.queued_before = 0  # requests in its own queue
        self.seats = inf  # slots learnt from that queue

        self.requests = 0
        self.sequences = 0  # as the engine counts: prompts times samples
        self.prefill_tokens = 0  # of requests without a first token
        self.long_tokens = 0  # of these, the longs'
        self.decode_tokens = 0  # output to come
        self.kv_tokens = 0  # cached or promised
        self.kv_coming = 0  # of these, before the first token
        self.kv_spare = 0  # charged but not held, by its page; < 0: held but not charged
        self.kv_more = 0  # on its page beyond the charges
        self.stems = PrefixTree()  # prefixes of its requests
        self.kv_apart = 0.0  # learnt share of common prefixes that is not shared
        self.pinned = 0  # hand-overs with blocks not fetched yet
        self.decoding = 0  # sequences after their first token
        self.written = 0  # tokens streamed, total
        self.worked_at = -inf  # when its page last showed progress
        self.free_at = 0.0  # when its prefills should be done
        self.due_at = 0.0  # when the next sign of progress is due
        self.elsewhere: WorkerLoad = NO_LOAD  # charges of other processes, included above
        self.inherited: WorkerLoad = NO_LOAD  # charges of its predecessor, included above
        self.heir: Worker | None = None  # the new worker at its address after removal

        self.reprice()

        self.served = 0  # number of its last request in the fleet
        self.shut = False  # full or barred
        self.ranked_in: tuple[Group, ...] = ()
        self.key = 0.0  # sort key in those groups

    def __repr__(self) -> str:
        """Return the name, role and load, for test failures."""
        return f"<Worker {self.name} {self.role} {self.requests} requests>"

    def respecify(self, spec: WorkerSpec) -> None:
        """Apply the operator's spec."""
        self.spec = spec
        self.role = spec.role
        self.misfit_short, self.misfit_long = MISFIT.get(spec.role, (1, 1))
        self.most = NO_LIMIT if spec.max_requests is None else spec.max_requests
        lengths = [length for length in (spec.max_model_len, self.told_max_model_len) if length]
        self.max_model_len = min(lengths, default=None)

    def is_meant_by(self, spec: WorkerSpec) -> bool:
        """True if a spec names the same address and model."""
        return (spec.url, spec.model) == (self.url, self.model)

    @property
    def url(self) -> str:
        """The base URL."""
        return self.spec.url

    @property
    def model(self) -> str:
        """The model of the fleet file."""
        return self.spec.model

    @property
    def strays(self) -> bool:
        """True if its model list lacks the configured model."""
        return self.spec.model not in self.models

    @property
    def why(self) -> str:
        """Return why requests for its model do not reach it; empty if they do."""
        if self.up and self.strays:
            return f"serves {a_few(self.models, FEW)}, not {self.spec.model}"
        return "" if self.up else self.trouble

    @property
    def max_requests(self) -> int | None:
        """Return the limit of requests in flight."""
        return self.spec.max_requests

    def works(self, now: float) -> bool:
        """True if its page showed progress lately, so that a late response is only slow.

        Good probes are not enough: an engine may hang under a healthy API server.
        """
        return self.up and now - self.worked_at <= WORKS_S

    @property
    def live(self) -> bool:
        """True if it may be given requests to decode."""
        return self.up and not self.draining and self.role.serves_whole

    @property
    def prefills(self) -> bool:
        """True if it may be given prefill legs."""
        return self.up and not self.draining and self.role is Role.PREFILL

    @property
    def limit(self) -> int:
        """Return its context length, or `NO_LIMIT`."""
        return self.max_model_len or NO_LIMIT

    @property
    def full(self) -> bool:
        """True if it has as many requests as allowed.

        Without `max_requests` the limit is twice the KV cache. So the worker's queue is never
        empty, and the other requests wait where they can still go elsewhere.
        """
        if self.requests >= self.most:
            return True
        room = self.kv_capacity
        return self.most is NO_LIMIT and 0 < OVERBOOKED * room <= self.kv_held

    @property
    def kv_held(self) -> int:
        """Return the tokens that its KV cache holds or soon will."""
        return max(self.kv_tokens - self.kv_spare, self.kv_coming)

    @property
    def barred(self) -> bool:
        """True if its breaker lets only trials pass."""
        breaker = self.breaker
        return not breaker.closed and (breaker.busy or not self.in_panic)

    def lets_pass(self, now: float) -> bool:
        """True if its breaker lets a request pass, even as a trial."""
        return not self.barred or self.breaker.lets_pass(now)

    def takes(self, now: float) -> bool:
        """True if it has room and its breaker lets a request pass."""
        return not self.shut or (not self.full and self.lets_pass(now))

    def may_hold(self, ask: RequestInfo) -> bool:
        """True if a request fits at the low end of its estimate."""
        return ask.needs - ask.prompt_error <= self.limit

    def surely_holds(self, ask: RequestInfo) -> bool:
        """True if a request fits at the high end of its estimate."""
        return ask.needs + ask.prompt_error <= self.limit

    def cached(self, held: Held) -> int:
        """Return the tokens of a prompt that it should have cached."""
        for tokens, holders in held:
            if holders & self.bit:
                return tokens
        return 0

    def reprice(self) -> None:
        """Update the cost of a token in seconds: its own time and that of other requests.

        Decoding requests lose a part of a prefill's time, and one more sequence lengthens each
        step. `cached_price` is the saving per cached token.
        """
        pace, others = self.pace, self.decoding + self.strangers
        self.flat_price = pace.fixed_s
        self.prompt_price = pace.token_s * (1.0 + STALL * others)
        self.output_price = pace.each_s * others
        self.cached_price = self.prompt_price * (1.0 - pace.missing)

    def ttft_s(self, ask: RequestInfo, now: float, cached: int) -> float:
        """Predict the time to first token with that many tokens cached."""
        wait = self.wait_s(now, for_long=ask.long)
        return wait + self.pace.first_token_s(ask.prompt_tokens - cached, 0.0, cached)

    def wait_s(self, now: float, *, for_long: bool) -> float:
        """Predict how long earlier prefills delay a new one.

        An overdue prefill is assumed to take as long again: the worker may hang.
        """
        pace = self.pace
        strange = self.strange_tokens
        if strange and not for_long:
            strange -= (1.0 - pace.passing) * self.strange_long
        if not self.prefill_tokens:
            return pace.token_s * strange
        most = pace.token_s * self.prefill_tokens
        wait = self.free_at - now
        if wait > most:
            wait = most
        elif wait < most * LEAST_WAIT_SHARE:
            wait = most * LEAST_WAIT_SHARE
        if self.long_tokens and not for_long:
            wait -= wait * (1.0 - pace.passing) * self.long_tokens / self.prefill_tokens
        if now > self.due_at:
            wait += now - self.due_at
        return wait + pace.token_s * strange

    def heard(self, now: float) -> None:
        """Note a sign of progress, or the first prefill after none."""
        pace = self.pace
        self.due_at = (
            now + pace.fixed_s + pace.token_s * (self.prefill_tokens + self.strange_tokens)
        )
        if self.heir is not None:  # the same server
            self.heir.heard(now)


class Group:
    """Live workers of one role and context length."""

    __slots__ = ("limit", "ranked", "role", "workers")

    def __init__(self, role: Role, limit: int, workers: list[Worker]) -> None:
        self.role = role
        self.limit = limit
        self.workers = workers
        self.ranked: list[tuple[float, int, Worker]] = []
        if len(workers) > MAX_UNRANKED:
            self.ranked = sorted((w.key, w.index, w) for w in workers)

    def drop(self, worker: Worker) -> None:
        """Remove a worker from its place."""
        del self.ranked[bisect_left(self.ranked, (worker.key, worker.index))]

    def put(self, worker: Worker) -> None:
        """Insert a worker at its place."""
        insort(self.ranked, (worker.key, worker.index, worker))

    def first(self) -> list[Worker]:
        """Return the workers to consider, none of them full or barred."""
        if not self.ranked:
            return [w for w in self.workers if not w.shut]
        return [w for _, _, w in self.ranked[:MAX_LOOKED_AT] if not w.shut]

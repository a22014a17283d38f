"""One worker as the router sees it: what it is, how it fares, and what is charged to it."""

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

# Of the predicted wait for prefills ahead, what is left at least while any of them is still about:
# one that takes longer than predicted has not vanished.
LEAST_WAIT_SHARE = 0.2
STALL = 0.3  # of a prefill's time that those who decode beside it lose
NO_LIMIT = sys.maxsize
FEW = 3  # of the models that a worker lists, to be told of
OVERBOOKED = 2
WORKS_S = 30.0  # of no progress on its own page: longer than a step, and than most prefills
# How badly a role suits a short and a long, where costs are equal.
MISFIT = {Role.SHORT: (0, 2), Role.LONG: (2, 0)}
# So many tokens of a prompt, and a mask of the workers that hold them; the most tokens first.
Held = list[tuple[int, int]]
# Of a model what was loaded for it, and of an adapter the model that it is for.
Origin = tuple[str | None, str | None]


MAX_UNRANKED = 32  # workers of a group that a decision looks at whole
MAX_LOOKED_AT = 8  # workers of a larger group that a decision looks at


class Worker:
    """A worker. Only the fleet changes one."""

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
        self.index = index  # its bit in the prefix index; another's once it is gone
        self.bit = 1 << index
        self.name = spec.name
        self.told_max_model_len: int | None = None  # by its /v1/models
        self.respecify(spec)
        self.models: tuple[str, ...] = (spec.model,)
        self.origins: dict[str, Origin] = {}  # of those, as far as it says

        self.awaited_since = 0.0  # for its first word; -inf: no more
        self.up = False
        self.up_since = 0.0  # when it came up last, or was seen to have been started anew
        self.probed = False  # until the first probe answers, nothing is known
        self.trouble = ""  # what was wrong with the last probe that failed, for people
        self.draining = False
        self.good_probes = self.failed_probes = 0  # in a row
        self.breaker = Breaker()
        self.in_panic = False  # whether its breaker is ignored: see `ejection`
        self.pace = LatencyModel()
        self.gauges: Gauges | None = None
        self.kv_capacity = 0  # tokens; 0 = not known
        self.strangers = self.strangers_before = 0  # requests on it that are not the router's
        # Tokens that it has to prefill for them, where it tells; of those, the longs'.
        self.strange_tokens = self.strange_tokens_before = self.strange_long = 0.0
        self.reports_cache = False
        self.queued = self.queued_before = 0  # requests that wait in its own queue
        self.seats = inf  # requests that it has room for, as far as that queue tells

        self.requests = 0
        self.sequences = 0  # as the engine counts: one for each prompt, and each of its samples
        self.prefill_tokens = 0  # of requests that wait for their first token
        self.long_tokens = 0  # of those, the longs'
        self.decode_tokens = 0  # still to be written
        self.kv_tokens = 0  # in its cache, or promised to be
        self.kv_coming = 0  # of those, of requests without a first token
        self.kv_spare = 0  # of them all, that it does not hold, by its own page; < 0: it holds more
        self.kv_more = 0  # that its page shows beyond what is charged
        self.stems = PrefixTree()  # that prompts on it begin with, and so share
        self.kv_apart = 0.0  # of what they should share, the part that is each one's own, learnt
        self.pinned = 0  # hand-overs whose blocks here nobody has fetched yet, as far as is known
        self.decoding = 0  # sequences past their first token
        self.written = 0  # tokens it has streamed, since ever
        self.worked_at = -inf  # when its own page showed last that it had computed something
        self.free_at = 0.0  # when its prefills should be done
        self.due_at = 0.0  # when one of them should have shown, since anything was heard
        self.elsewhere: WorkerLoad = NO_LOAD  # of all this, what other processes have charged
        self.inherited: WorkerLoad = NO_LOAD  # and what is for who had its address before it
        self.heir: Worker | None = None  # who came to its address once it was taken out

        self.reprice()

        self.served = 0  # when it was last given a request, in requests of the whole fleet
        self.shut = False  # full, or its breaker keeps requests from it
        self.ranked_in: tuple[Group, ...] = ()
        self.key = 0.0  # its place there

    def __repr__(self) -> str:
        """Name it: what the eye wants in a failing test."""
        return f"<Worker {self.name} {self.role} {self.requests} requests>"

    def respecify(self, spec: WorkerSpec) -> None:
        """Take what the operator states."""
        self.spec = spec
        self.role = spec.role
        self.misfit_short, self.misfit_long = MISFIT.get(spec.role, (1, 1))
        self.most = NO_LIMIT if spec.max_requests is None else spec.max_requests
        lengths = [length for length in (spec.max_model_len, self.told_max_model_len) if length]
        self.max_model_len = min(lengths, default=None)

    def is_meant_by(self, spec: WorkerSpec) -> bool:
        """Whether this is of it; at another address or of another model it is a namesake."""
        return (spec.url, spec.model) == (self.url, self.model)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.spec.url

    @property
    def model(self) -> str:
        """The name it goes by in the fleet file."""
        return self.spec.model

    @property
    def strays(self) -> bool:
        """Whether it lists models, and that which it is here for is not among them."""
        return self.spec.model not in self.models

    @property
    def why(self) -> str:
        """Say what keeps its own model's requests from it, as probes found it; empty if nothing."""
        if self.up and self.strays:
            return f"serves {a_few(self.models, FEW)}, not {self.spec.model}"
        return "" if self.up else self.trouble

    @property
    def max_requests(self) -> int | None:
        """How many requests it may have in flight."""
        return self.spec.max_requests

    def works(self, now: float) -> bool:
        """Whether it is known to compute: one that does not answer yet is slow then, and no more.

        To be up says less: an engine may hang under a server that answers probes.
        """
        return self.up and now - self.worked_at <= WORKS_S

    @property
    def live(self) -> bool:
        """Whether it may be given anything at all."""
        return self.up and not self.draining and self.role.serves_whole

    @property
    def prefills(self) -> bool:
        """Whether it may be given the prefill of a hand-over."""
        return self.up and not self.draining and self.role is Role.PREFILL

    @property
    def limit(self) -> int:
        """The context that it can hold, as far as is known."""
        return self.max_model_len or NO_LIMIT

    @property
    def full(self) -> bool:
        """Whether it has as many requests as it may.

        Where nobody said how many: as many as twice its KV cache would hold, so that its own
        queue is never empty and the rest waits where it may still go elsewhere.
        """
        if self.requests >= self.most:
            return True
        room = self.kv_capacity
        return self.most is NO_LIMIT and 0 < OVERBOOKED * room <= self.kv_held

    @property
    def kv_held(self) -> int:
        """How many tokens its KV cache holds or should soon, as far as anybody knows."""
        return max(self.kv_tokens - self.kv_spare, self.kv_coming)

    @property
    def barred(self) -> bool:
        """Whether its breaker keeps requests from it, but for trials."""
        breaker = self.breaker
        return not breaker.closed and (breaker.busy or not self.in_panic)

    def lets_pass(self, now: float) -> bool:
        """Whether its breaker lets a request pass, be it as a trial."""
        return not self.barred or self.breaker.lets_pass(now)

    def takes(self, now: float) -> bool:
        """Whether it has room and its breaker lets a request pass."""
        return not self.shut or (not self.full and self.lets_pass(now))

    def may_hold(self, ask: RequestInfo) -> bool:
        """Whether it can hold a request if the estimate is too high by as much as it may be."""
        return ask.needs - ask.prompt_error <= self.limit

    def surely_holds(self, ask: RequestInfo) -> bool:
        """Whether it can hold a request even if the estimate is as low as it may be."""
        return ask.needs + ask.prompt_error <= self.limit

    def cached(self, held: Held) -> int:
        """Reckon how many tokens of a prompt it should have cached."""
        for tokens, holders in held:
            if holders & self.bit:
                return tokens
        return 0

    def reprice(self) -> None:
        """Reckon what a token costs here now, in seconds: its own time, and that of others.

        Those that decode beside a prefill lose some of its time, and each step is the longer for
        one more sequence. The third price is what a token saves that should be cached.
        """
        pace, others = self.pace, self.decoding + self.strangers
        self.flat_price = pace.fixed_s
        self.prompt_price = pace.token_s * (1.0 + STALL * others)
        self.output_price = pace.each_s * others
        self.cached_price = self.prompt_price * (1.0 - pace.missing)

    def ttft_s(self, ask: RequestInfo, now: float, cached: int) -> float:
        """Predict a request's time to first token, with so many of its tokens cached."""
        wait = self.wait_s(now, for_long=ask.long)
        return wait + self.pace.first_token_s(ask.prompt_tokens - cached, 0.0, cached)

    def wait_s(self, now: float, *, for_long: bool) -> float:
        """Predict how long the prefills charged to it, and strangers', keep a new one waiting.

        What is overdue is taken to last as long again: it may be cached and cost nothing, and its
        worker hang.
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
        """Note a sign of life, or that it was given a prefill while it had none."""
        pace = self.pace
        self.due_at = (
            now + pace.fixed_s + pace.token_s * (self.prefill_tokens + self.strange_tokens)
        )
        if self.heir is not None:  # it is the same server
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
        """Take a worker from its place."""
        del self.ranked[bisect_left(self.ranked, (worker.key, worker.index))]

    def put(self, worker: Worker) -> None:
        """Put a worker in its place."""
        insort(self.ranked, (worker.key, worker.index, worker))

    def first(self) -> list[Worker]:
        """Those to look at, none of them full or resting."""
        if not self.ranked:
            return [w for w in self.workers if not w.shut]
        return [w for _, _, w in self.ranked[:MAX_LOOKED_AT] if not w.shut]

"""The worker where a request costs all requests the least time.

Idea: a placement costs the request's predicted time to first token plus the delay of others:

- Its prefill stalls the decodes there; its decode lengthens their steps.
- A long request on a short worker delays later short ones: with r per second, a prefill of T
  seconds costs r T T / 2. So only an idle short pool takes long requests.
- A short request on a long worker is delayed for the share of time that long prefills take.

After recent long requests, short ones may not use the last quarter of a long worker's slots or KV
cache; while long ones wait, none of it.

A request waits for a slot of the full worker that has its cache, if the predicted wait and its cost
there are less than the cost elsewhere (see `cache_waits`).

A decode worker offers a hand-over if that costs less (see `handover_cost`). A cached prefix is
worth only its prefill time, so popular prefixes spread.

Cost: some twenty multiplications per candidate. How it fails: before the workers' pace is learned,
it balances tokens. Workers that slow down at long contexts get too many long requests.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter

from proxy.core.fleet import slots
from proxy.core.fleet.kv_usage import KV_FULL, shared_tokens
from proxy.core.fleet.leases import CacheWait, Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.specs import Score
from proxy.core.model.types import Reason, RequestInfo
from proxy.core.routing.view import (
    DECODE,
    MISFIT_OTHER_POOL,
    HandoverOffer,
    Rule,
    View,
    own_pool_is_left,
    reason_for,
)

EQUAL_COST_SHARE, EQUAL_COST_S = 0.03, 0.001
RESERVED_SHARE = 0.25  # of a long worker, while long requests are expected
MAX_CACHE_WAIT = 4.0  # times what the cache saves; chosen with `benchmarks.agents`
# A typical request, to sort the workers of a large group.
USUAL_PROMPT, USUAL_OUTPUT = 500, 100
PREFIX = Reason.PREFIX
SUITS_SHORT = attrgetter("misfit_short", "requests", "last_used")
SUITS_LONG = attrgetter("misfit_long", "requests", "last_used")


class Adaptive(Rule):
    name = "adaptive"
    by_size = True
    affine = True

    def choose(self, view: View) -> Decision | None:
        info, prefixes, offer = view.info, view.cached_prefixes, view.offer
        candidates = view.candidates
        if is_reserve_kept(view):
            candidates = [w for w in candidates if not is_reserved(w, view)]
            if not candidates:
                return None
        costs, uncached = placement_costs(candidates, view)
        handed = apply_handovers(costs, candidates, view, offer) if offer is not None else ()
        worker = cheapest(candidates, costs, long=info.long)
        if offer is not None and worker in handed:
            if offer.may_begin(worker, view):
                return self._hand_over(worker, offer, view)
            # The prefill would end before the decode worker has room. Other workers may be faster.
            view.candidates = [w for w in candidates if w not in handed or offer.may_begin(w, view)]
            return self.choose(view) if view.candidates else None
        cached = worker.cached_tokens(prefixes) if prefixes else 0
        others_cache_more = bool(prefixes) and prefixes[0][0] > cached
        if others_cache_more and view.cache_waits is not None:
            view.cache_wait = find_cache_wait(view, min(costs), worker)
            if view.cache_wait is not None:
                return None
        reason = reason_for(worker, view)
        some_cache_less = cached and view.pool.bits & ~prefixes[0][1]
        if some_cache_less and cheapest(candidates, uncached, long=info.long) is not worker:
            reason = PREFIX
        ttft_s = worker.ttft_s(info, view.now, cached)
        scores = tuple(score(w, view) for w in candidates) if view.explain else ()
        return Decision(worker, reason, ttft_s, scores, cached)

    def _hand_over(self, worker: Worker, offer: HandoverOffer, view: View) -> Decision:
        decision = offer.decision(worker, view)
        if view.explain:
            decision.scores = tuple(score(w, view) for w in view.candidates)
        return decision

    def rank(self, worker: Worker) -> float:
        usual = worker.prompt_price * USUAL_PROMPT + worker.output_price * USUAL_OUTPUT
        ahead = worker.prefill_tokens + worker.foreign_tokens
        return worker.pace.fixed_s + worker.pace.token_s * ahead + usual

    def note(self, worker: Worker, view: View) -> str:
        if is_reserve_kept(view) and is_reserved(worker, view):
            return "reserved for long requests"
        offer = view.offer
        if offer is not None and worker.role is DECODE and not offer.may_begin(worker, view):
            return "no room yet for a hand-over"
        if view.cache_wait is not None:
            return f"higher cost than the wait for {view.cache_wait.worker.name}"
        return "higher cost than the chosen worker"


def placement_costs(candidates: list[Worker], view: View) -> tuple[list[float], list[float]]:
    """Return the costs in seconds, and the costs without caches."""
    info, now, prefixes = view.info, view.now, view.cached_prefixes
    long, prompt = info.long, info.prompt_tokens
    output = info.expected_output * info.samples
    mixed = long or view.traffic.has_longs
    costs: list[float] = []
    uncached: list[float] = []
    for worker in candidates:
        cost = worker.flat_price + worker.prompt_price * prompt + worker.output_price * output
        if worker.prefill_tokens or worker.foreign_tokens:
            cost += worker.wait_s(now, for_long=long)
        if worker.kv_capacity:
            cost += kv_wait_s(worker, info, prompt + output)
        if mixed:
            cost += misfit_s(worker, view)
        if prefixes:
            uncached.append(cost)
            cost -= worker.cached_price * worker.cached_tokens(prefixes)
        costs.append(cost)
    return costs, uncached


def find_cache_wait(view: View, cost_s: float, other: Worker) -> CacheWait | None:
    """Return a wait for a full worker that costs less than a placement on the other worker.

    At its end the other would still be in time. If it is late now, any wait in time counts.
    """
    cached = other.cached_tokens(view.cached_prefixes)
    full = [
        worker
        for worker in view.cache_holders
        if worker.cached_tokens(view.cached_prefixes) > cached and may_await(worker, view)
    ]
    if not full:
        return None
    latest = view.first_token_due - other.ttft_s(view.info, view.now, cached)
    if latest >= view.now:
        return cheapest_wait(full, view, cost_s, latest)
    wait = cheapest_wait(full, view, cost_s, inf) if view.info.deadline == inf else None
    return wait or cheapest_wait_in_time(full, view)


def cheapest_wait(full: list[Worker], view: View, cost_s: float, latest: float) -> CacheWait | None:
    """Return a wait that costs less than `cost_s` and ends before `latest`."""
    now, least_s = view.now, cost_s
    best: CacheWait | None = None
    for worker in full:
        own_s, wait_s = cost_after_wait(worker, view)
        until = min(now + MAX_CACHE_WAIT * (cost_s - own_s), latest, view.wait_until)
        if own_s + wait_s < least_s and now + wait_s < latest and now < until:
            least_s = own_s + wait_s
            best = CacheWait(
                worker,
                wait_s,
                until,
                others_late=False,
                placed_elsewhere=worker.remote_load.total_placed,
            )
    return best


def cheapest_wait_in_time(full: list[Worker], view: View) -> CacheWait | None:
    """Return a wait after which the full worker itself is in time."""
    now, least_s = view.now, inf
    best: CacheWait | None = None
    for worker in full:
        own_s, wait_s = cost_after_wait(worker, view)
        cached = worker.cached_tokens(view.cached_prefixes)
        until = view.first_token_due - worker.ttft_s(view.info, now, cached)
        if own_s + wait_s < least_s and now + wait_s < until:
            least_s = own_s + wait_s
            best = CacheWait(
                worker,
                wait_s,
                until,
                others_late=True,
                placed_elsewhere=worker.remote_load.total_placed,
            )
    return best


def cost_after_wait(worker: Worker, view: View) -> tuple[float, float]:
    waiting = 0 if view.cache_waits is None else view.cache_waits.count(worker)
    return placement_costs([worker], view)[0][0], slots.next_slot_s(worker, waiting)


def may_await(worker: Worker, view: View) -> bool:
    return (
        worker.is_full
        and worker in view.pool.members
        and not worker.is_barred
        and worker not in view.tried
        and worker.surely_fits(view.info)
        and not (is_reserve_kept(view) and is_reserved(worker, view))
    )


def apply_handovers(
    costs: list[float], candidates: list[Worker], view: View, offer: HandoverOffer
) -> set[Worker]:
    """Change the costs to those with a hand-over; return the workers where one costs less."""
    info = view.info
    handed: set[Worker] = set()
    need = info.prompt_tokens + info.expected_output * info.samples
    for at, worker in enumerate(candidates):
        wait_s = kv_wait_s(worker, info, need)  # for room; needed either way
        if (cost_s := offer.cost_if_better(worker, view, costs[at] - wait_s)) is not None:
            costs[at] = cost_s + wait_s
            handed.add(worker)
        elif worker.role is DECODE:
            costs[at] += offer.harm_s(worker, view)
    return handed


def cheapest(candidates: list[Worker], costs: list[float], *, long: bool) -> Worker:
    """Return the worker with the least cost; ties go to fit, load, turn."""
    highest = min(costs) * (1.0 + EQUAL_COST_SHARE) + EQUAL_COST_S
    close = [worker for worker, cost in zip(candidates, costs, strict=True) if cost <= highest]
    return min(close, key=SUITS_LONG if long else SUITS_SHORT) if len(close) > 1 else close[0]


def score(worker: Worker, view: View) -> Score:
    info, pace = view.info, worker.pace
    costs = placement_costs([worker], view)[0]
    offer = view.offer
    if offer is not None and apply_handovers(costs, [worker], view, offer):
        wait_s = offer.prefill_s + offer.wait_s(worker, view)
        transfer_s = offer.transfer_s(worker, view)
        harm_s = costs[0] - wait_s - transfer_s - pace.step_s(worker.num_decoding)
        cached, is_reported = offer.cached_tokens, offer.prefill.reports_prefixes
        return Score(
            worker.name, costs[0], wait_s, transfer_s, harm_s, cached, is_reported,
            prefill_by=offer.prefill.name,
        )  # fmt: skip
    cached = worker.cached_tokens(view.cached_prefixes)
    prefill_s = pace.first_token_s(info.prompt_tokens - cached, 0.0, cached) - pace.fixed_s
    wait_s = worker.wait_s(view.now, for_long=info.long)
    wait_s += kv_wait_s(worker, info, info.prompt_tokens + info.expected_output * info.samples)
    harm_s = costs[0] - wait_s - prefill_s - pace.fixed_s
    is_reported = worker.reports_prefixes
    return Score(worker.name, costs[0], wait_s, prefill_s, harm_s, cached, is_reported)


def misfit_s(worker: Worker, view: View) -> float:
    """Return the delay from a request in the other size's pool."""
    info, traffic, now = view.info, view.traffic, view.now
    if info.long:
        if worker.misfit_long < MISFIT_OTHER_POOL:
            return 0.0
        prefill = worker.pace.token_s * info.prompt_tokens
        return traffic.shorts_per_s(now) / max(view.pool.num_shorts, 1) * prefill * prefill / 2.0
    if worker.misfit_short < MISFIT_OTHER_POOL:
        return 0.0
    share = min(traffic.workers_with_longs(now) / max(view.pool.num_longs, 1), 1.0)
    return share * info.expected_output * worker.pace.step_s(worker.num_decoding)


def kv_wait_s(worker: Worker, info: RequestInfo, need: int) -> float:
    """Return the wait for KV cache, if its size is known.

    A shared prefix needs no room: full caches would separate its requests and stay full.
    """
    capacity = worker.kv_capacity
    room = KV_FULL * capacity - need
    # `kv_held` inlined: this runs for every candidate.
    if not capacity or worker.kv_tokens - worker.kv_overcharged <= room >= worker.kv_coming:
        return 0.0
    held = worker.kv_held
    if held <= 0:
        return 0.0
    over = held - room - shared_tokens(worker, info)
    if over <= 0:
        return 0.0
    left_each = worker.decode_tokens / max(worker.num_decoding, 1)
    return min(over / held, 1.0) * left_each * worker.pace.step_s(worker.num_decoding)


def is_reserve_kept(view: View) -> bool:
    """Return whether this request must respect the reserve.

    A request without another worker is exempt.
    """
    if not view.pool.num_longs or view.info.long or view.info.pinned:
        return False
    if not (view.longs_waiting or view.traffic.has_recent_longs(view.now)):
        return False
    return own_pool_is_left(view)


def is_reserved(worker: Worker, view: View) -> bool:
    if worker.misfit_short < MISFIT_OTHER_POOL:
        return False
    if view.longs_waiting:
        return True
    limit = worker.max_requests
    if limit is not None and worker.requests + 1 > limit - max(int(limit * RESERVED_SHARE), 1):
        return True
    return worker.gauges is not None and worker.gauges.kv_usage > 1.0 - RESERVED_SHARE

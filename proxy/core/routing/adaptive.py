"""The worker where a request costs everybody the least time.

Idea: the cost of a placement is the request's own predicted time to first token (what waits ahead
of it, and its prefill less what is cached), plus the delay it brings to others:

- Those that decode there stand still for its prefill, and every step of its own answer is longer
  by its sequences.
- A long on a short worker delays the shorts expected meanwhile: with r of them a second, a prefill
  of T seconds costs r T T / 2. An idle short pool is therefore open to longs, a busy one is not.
- A short on a long worker will itself be delayed by the longs to come, for the share of time that
  longs keep such workers. With no longs about the share is zero, and the pools are one.

Longs that wait, or came lately, also keep a reserve: shorts may not take the last quarter of a long
worker's places or of its KV cache, and none at all while longs wait for one. Costs within a few per
cent are equal: then the pool that is there for the size, the fewest requests, and turn decide.

A cached prefix is worth its prefill time and no more, so requests that share one spread as soon as
the delay they cause each other exceeds that, and whoever takes the first of them has it cached too.

Cost: some twenty multiplications per candidate. How it fails: everything is in predicted seconds,
so until the workers' pace is learnt it balances by tokens; a worker that is much slower for long
contexts than its pace says gets somewhat too many of them.
"""

from __future__ import annotations

from proxy.core.routing.view import WRONG, Rule, View, reason_for
from proxy.core.types import Decision, Reason, Score
from proxy.core.worker import Worker

STALL = 0.3  # of a prefill's time that those who decode beside it lose
SAME, SAME_S = 0.03, 0.001  # costs this close are equal
RESERVE = 0.25  # of a long worker, while longs are about
KV_FULL = 0.95
# A request as they come, to put the workers of a large group in order.
USUAL_PROMPT, USUAL_OUTPUT = 500, 100

# Total, wait, prefill, harm; tokens cached, and the seconds that these save.
Cost = tuple[float, float, float, float, int, float]
PREFIX = Reason.PREFIX


class Adaptive(Rule):
    """See the module's text."""

    name = "adaptive"

    def choose(self, view: View) -> Decision | None:
        """Choose the least cost."""
        candidates = view.candidates
        if view.pool.longs and not view.ask.long and longs_are_about(view):
            candidates = [w for w in candidates if not reserved(w, view)]
            if not candidates:
                return None
        costs = reckon(candidates, view)
        best = cheapest(candidates, costs, view.ask.long)
        worker, (total, wait, prefill, _, cached, saved) = candidates[best], costs[best]
        reason = reason_for(worker, view)
        if saved and any(cost[0] + cost[5] < total + saved for cost in costs):
            reason = PREFIX  # another would have been cheaper had nothing been cached
        scores: tuple[Score, ...] = ()
        if view.explain:
            scores = tuple(
                Score(w.name, *cost[:5]) for w, cost in zip(candidates, costs, strict=True)
            )
        ttft_s = worker.pace.fixed_s + wait + prefill
        return Decision(worker, reason, ttft_s, scores, cached)

    def rank(self, worker: Worker) -> float:
        """Reckon the cost of a usual request."""
        pace = worker.pace
        prefill = pace.token_s * USUAL_PROMPT
        harm = worker.decoding * (STALL * prefill + USUAL_OUTPUT * pace.each_s)
        return pace.fixed_s + pace.token_s * worker.prefill_tokens + prefill + harm


def reckon(candidates: list[Worker], view: View) -> list[Cost]:
    """Reckon what each placement costs, in seconds."""
    ask, now, held = view.ask, view.now, view.held
    long, prompt = ask.long, ask.prompt_tokens
    output = ask.expected_output * ask.samples
    costs: list[Cost] = []
    for worker in candidates:
        pace = worker.pace
        token_s = pace.token_s
        prefill, cached, saved = token_s * prompt, 0, 0.0
        if held and (cached := worker.cached(held)):
            saved = token_s * cached
            prefill -= saved
        wait = worker.wait_s(now, for_long=long) if worker.prefill_tokens else 0.0
        if worker.kv_capacity:
            wait += kv_wait_s(worker, prompt + output)
        harm = 0.0
        if decoding := worker.decoding + worker.strangers:
            harm = decoding * (STALL * prefill + output * pace.each_s)
            saved += decoding * STALL * saved
        if worker.misfit[long] == WRONG:
            harm += misfit_s(worker, view, prefill)
        costs.append((pace.fixed_s + wait + prefill + harm, wait, prefill, harm, cached, saved))
    return costs


def misfit_s(worker: Worker, view: View, prefill_s: float) -> float:
    """Reckon the delay between the sizes, where one is put into the other's pool."""
    ask, traffic, now = view.ask, view.traffic, view.now
    if ask.long:
        rate = traffic.shorts_per_s(now) / view.pool.shorts
        return rate * prefill_s * prefill_s / 2.0
    if not traffic.any_long:
        return 0.0
    share = min(traffic.long_share(now) / view.pool.longs, 1.0)
    return share * ask.expected_output * worker.pace.step_s(worker.decoding)


def kv_wait_s(worker: Worker, need: int) -> float:
    """Reckon how long until enough of the KV cache is free."""
    over = worker.kv_tokens + need - KV_FULL * worker.kv_capacity
    if over <= 0 or not worker.kv_tokens:
        return 0.0
    left_each = worker.decode_tokens / max(worker.decoding, 1)
    return min(over / worker.kv_tokens, 1.0) * left_each * worker.pace.step_s(worker.decoding)


def cheapest(candidates: list[Worker], costs: list[Cost], long: bool) -> int:
    """Return the place of the least cost; among equals, of who suits, has least, and waited."""
    if len(costs) == 1:
        return 0
    near = min(costs)[0] * (1.0 + SAME) + SAME_S
    best = -1
    best_key = (0, 0, 0)
    for place, worker in enumerate(candidates):
        if costs[place][0] <= near:
            key = (worker.misfit[long], worker.requests, worker.served)
            if best < 0 or key < best_key:
                best, best_key = place, key
    return best


def longs_are_about(view: View) -> bool:
    """Whether there is a reserve to keep."""
    return view.longs_waiting or view.traffic.longs_lately(view.now)


def reserved(worker: Worker, view: View) -> bool:
    """Whether what is left of a worker is kept for longs."""
    if worker.misfit[False] != WRONG:
        return False
    if view.longs_waiting:
        return True
    most = worker.max_requests
    if most is not None and worker.requests + 1 > most - max(int(most * RESERVE), 1):
        return True
    return worker.gauges is not None and worker.gauges.kv_usage > 1.0 - RESERVE

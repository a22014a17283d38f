"""The published prefix-aware rules of other routers, with our router's knowledge of prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Reason
from proxy.core.routing.view import Rule, View
from vllm_sched.sim.types import Engine


class CacheAware(Rule):
    """vllm-router's and SGLang router's `cache_aware` with its defaults.

    Source: `src/policies/cache_aware.rs`. Where the numbers of requests are uneven, the least
    loaded worker is chosen; else the worker with the longest match, if that is a large share of the
    prompt, or the one with the smallest tree: here with the fewest new prompt tokens.
    """

    name = "cache_aware"
    affine = True
    CACHE_THRESHOLD: Final = 0.3
    BALANCE_ABS: Final = 64
    BALANCE_REL: Final = 1.5

    def __init__(self) -> None:
        self._tree: dict[str, int] = {}

    def choose(self, view: View) -> Decision | None:
        info, loads = view.info, [worker.requests for worker in view.candidates]
        most, least = max(loads), min(loads)
        by_load = min(view.candidates, key=lambda worker: worker.requests)
        best = max(view.candidates, key=lambda worker: worker.cached_tokens(view.cached_prefixes))
        cached = best.cached_tokens(view.cached_prefixes)
        if most - least > self.BALANCE_ABS and most > self.BALANCE_REL * least:
            chosen = by_load
        elif cached > self.CACHE_THRESHOLD * info.prompt_tokens:
            chosen = best
        else:
            chosen = min(view.candidates, key=lambda worker: self._tree.get(worker.name, 0))
        new = info.prompt_tokens - chosen.cached_tokens(view.cached_prefixes)
        self._tree[chosen.name] = self._tree.get(chosen.name, 0) + new
        return Decision(chosen, Reason.PREFIX, 0.0, (), chosen.cached_tokens(view.cached_prefixes))

    def rank(self, worker: Worker) -> float:
        return worker.requests


class WeightedScores(Rule):
    """llm-d's endpoint picker: the highest sum of prefix, queue and KV cache scores.

    Source: the guide "inference scheduling" and the Gateway API Inference Extension's scorers:
    weights 3, 2 and 2. Queues and caches are seen at once, not every 50 ms.
    """

    name = "weighted_scores"
    affine = True
    PREFIX: Final = 3.0
    QUEUE: Final = 2.0
    KV_USAGE: Final = 2.0

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    def choose(self, view: View) -> Decision | None:
        seen = [self._engines[worker.name].gauges(view.now) for worker in view.candidates]
        queues = queue_scores([gauges.waiting for gauges in seen])
        prompt = max(view.info.prompt_tokens, 1)
        scores = [
            self.PREFIX * worker.cached_tokens(view.cached_prefixes) / prompt
            + self.QUEUE * queue
            + self.KV_USAGE * (1.0 - gauges.kv_usage)
            for worker, queue, gauges in zip(view.candidates, queues, seen, strict=True)
        ]
        # Equal scores are rare: usages differ.
        chosen = view.candidates[max(range(len(scores)), key=scores.__getitem__)]
        return Decision(chosen, Reason.PREFIX, 0.0, (), chosen.cached_tokens(view.cached_prefixes))

    def rank(self, worker: Worker) -> float:
        return worker.requests


def queue_scores(waiting: Sequence[int]) -> list[float]:
    """Return 1 for the shortest queue, 0 for the longest."""
    most, least = max(waiting), min(waiting)
    if most == least:
        return [1.0] * len(waiting)
    return [(most - length) / (most - least) for length in waiting]

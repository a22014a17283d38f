"""The order of `running`: vLLM serves the first request first, and preempts the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_sched.engine.steps.hooks import PolicyHooks
from vllm_sched.engine.steps.service_classes import ServiceClasses
from vllm_sched.policies.kv_cache import KvCache
from vllm_sched.policies.types import Policy


class SortedRunning(NamedTuple):
    prefills: list[Request]
    decoding: list[Request]
    decode_is_last: bool = False  # behind prefills


class RunningOrder:
    """Puts decodes before prefills, and the request to preempt last."""

    def __init__(
        self,
        scheduler: Scheduler,
        policies: Sequence[Policy],
        hooks: PolicyHooks,
        classes: ServiceClasses,
        kv_cache: KvCache,
    ) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._classes = classes
        self._kv_cache = kv_cache
        self._sorts = any(policy.sorts_running for policy in policies)
        # With priority scheduling vLLM preempts by priority.
        self._by_class = (
            classes.policy is not None and scheduler.policy != SchedulingPolicy.PRIORITY
        )

    def sort(self, kv_free: float) -> SortedRunning:
        """Sort `running` if a policy asks for it."""
        prefills, decoding = self._split()
        by_class = self._by_class and self._may_preempt(kv_free, prefills)
        if not (by_class or (prefills and self._sorts)):
            return SortedRunning(prefills, decoding)
        prefills.sort(key=self._rank)
        classes: dict[Request, float] = {}
        if by_class:
            classes = self._classes.classes_of_decodes(decoding)
            decoding.sort(key=classes.__getitem__)
        self._scheduler.running[:] = decoding + prefills
        if not (prefills and decoding):
            return SortedRunning(prefills, decoding)
        is_worst = by_class and self._move_worst_class_last(prefills, decoding, classes)
        is_preempted = self._preempts_newest(prefills[-1], decoding[-1])
        if is_preempted:
            self._scheduler.running.remove(decoding[-1])
            self._scheduler.running.append(decoding[-1])
        return SortedRunning(prefills, decoding, is_worst or is_preempted)

    def _split(self) -> tuple[list[Request], list[Request]]:
        running, in_prefill = self._scheduler.running, self._scheduler._inflight_prefills
        if not (count := len(in_prefill)):
            return [], running.copy()
        # After the step before: decodes, prefills, new requests.
        tail = running[-count:]
        if all(r.is_prefill_chunk and r in in_prefill for r in tail):
            return tail, running[:-count]
        return (
            [request for request in running if request.is_prefill_chunk],
            [request for request in running if not request.is_prefill_chunk],
        )

    def _move_worst_class_last(
        self, prefills: list[Request], decoding: list[Request], classes: dict[Request, float]
    ) -> bool:
        """Let requests of the worst class be preempted first, decodes included."""
        class_of = self._classes.class_of
        if classes[decoding[-1]] <= class_of(prefills[0]):
            return False
        all_classes = classes | {request: class_of(request) for request in prefills}
        self._scheduler.running.sort(key=all_classes.__getitem__)
        return True

    def _rank(self, request: Request) -> tuple[float, ...]:
        return tuple(rank(request) for rank in self._hooks.rank)

    def _may_preempt(self, kv_free: float, prefills: Sequence[Request]) -> bool:
        """Return whether a step may need more KV blocks than are free."""
        tokens = self._scheduler.max_num_scheduled_tokens if prefills else 0
        cache = self._kv_cache
        running = len(self._scheduler.running)
        blocks = 2 * running * len(cache.groups) + cache.blocks_at_most(tokens)
        return bool(kv_free * cache.blocks < blocks)

    def _preempts_newest(self, last: Request, newest: Request) -> bool:
        """Return whether the newest decode should be preempted before the last prefill.

        A decode that was preempted is recomputed as a prefill, and as the last request would be
        preempted again and again. In vLLM's own order the newest decode is preempted.
        """
        if not last.num_output_tokens or self._scheduler.policy == SchedulingPolicy.PRIORITY:
            return False
        # Never preempt for a request of a worse class.
        return self._classes.class_of(last) <= self._classes.class_of(newest)

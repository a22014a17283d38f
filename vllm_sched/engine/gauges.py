"""The gauges of an engine at one moment, from its queue and its running requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from vllm.v1.request import Request

from vllm_sched.engine import metrics
from vllm_sched.engine.waiting.lane_counts import LaneKey
from vllm_sched.engine.waiting.queue import LaneQueue
from vllm_sched.policies.types import Policy

# The label `class` of prompts is their lane of this policy.
CLASS_POLICY: Final = "long_prompt"
ALL: Final = "all"


def label_of(lane: str) -> str:
    """Return the name of a lane for metrics: `long` for `long/15`, and ALL for a single lane."""
    return lane.partition("/")[0] or ALL


@dataclass(slots=True)
class EngineGauges:
    policies: Sequence[Policy]
    running: Sequence[Request]
    keys_of_running: Mapping[str, LaneKey]  # in which running requests waited
    by_name: metrics.Gauges = field(
        default_factory=partial(defaultdict, partial(defaultdict, float))
    )

    def read(self, queue: Any, held_by: Mapping[LaneKey, int]) -> metrics.Gauges:
        """Return the gauges by name; `held_by` has the policy that holds each lane."""
        if isinstance(queue, LaneQueue):
            self._add_waiting(queue)
            self._add_running()
            self._add_held(queue, held_by)
        else:
            self.by_name["requests_waiting"][metrics.NO_POLICY, ALL] = len(queue)
            self.by_name["requests_running"][metrics.NO_POLICY, ALL] = len(self.running)
            waiting = sum([r.num_tokens - r.num_computed_tokens for r in queue])
            self.by_name["prefill_backlog_tokens"][ALL,] = waiting
        self._add_prefills()
        return self.by_name

    @property
    def class_policy_index(self) -> int | None:
        names = [policy.name for policy in self.policies]
        return names.index(CLASS_POLICY) if CLASS_POLICY in names else None

    def _add_waiting(self, queue: LaneQueue) -> None:
        waiting, oldest = self.by_name["requests_waiting"], self.by_name["oldest_wait_seconds"]
        by_policy = queue.lane_counts.by_policy
        for policy, counts in zip(self.policies, by_policy, strict=True):
            for lane, count in counts.items():
                waiting[policy.name, label_of(lane)] += count.requests
                oldest[policy.name, label_of(lane)] = 0.0
        for lane_key, waited in queue.head_waits():
            for policy, lane in zip(self.policies, lane_key, strict=True):
                key = policy.name, label_of(lane)
                oldest[key] = max(oldest[key], waited)
        index = self.class_policy_index
        for lane, count in by_policy[index or 0].items():
            name = ALL if index is None else label_of(lane)
            self.by_name["prefill_backlog_tokens"][name,] += count.tokens

    def _add_running(self) -> None:
        without_gate = (metrics.OTHER,) * len(self.policies)
        keys = [self.keys_of_running.get(r.request_id, without_gate) for r in self.running]
        for lane_key, count in Counter(keys).items():
            for policy, lane in zip(self.policies, lane_key, strict=True):
                self.by_name["requests_running"][policy.name, label_of(lane)] += count

    def _add_held(self, queue: LaneQueue, held_by: Mapping[LaneKey, int]) -> None:
        held = self.by_name["requests_held"]
        for policy in self.policies:
            held.update({(policy.name, reason): 0.0 for reason in policy.held_reasons})
        for lane_key, number in held_by.items():
            if waiting := queue.lane_counts.waiting[lane_key]:
                policy = self.policies[number]
                held[policy.name, policy.held_reason(lane_key[number])] += waiting

    def _add_prefills(self) -> None:
        backlog, prefills = self.by_name["prefill_backlog_tokens"], self.by_name["prefills_running"]
        prefills.update(dict.fromkeys(backlog, 0))
        index = self.class_policy_index
        for request in self.running:
            if request.is_prefill_chunk:
                lane_key = self.keys_of_running.get(request.request_id)
                name = ALL if lane_key is None or index is None else label_of(lane_key[index])
                backlog[name,] += request.num_tokens - request.num_computed_tokens
                prefills[name,] += 1

"""Settings of the router's core."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from proxy.core.queue.fairness import FairnessSettings
from proxy.core.queue.latency_admission import AdmissionSettings

# Of `short_limit`, for short workers: sizes are estimates.
HEADROOM: Final = 2


@dataclass(frozen=True, slots=True)
class RouterSettings:
    policy: str = "adaptive"
    short_limit: int = 10_000
    prefix_affinity: bool = True
    tokenize: bool = True
    cut_output: bool = False  # to the largest worker's context
    max_attempts: int = 3
    retry_budget: float = 0.2
    panic_threshold: float = 0.5  # of closed breakers
    queue_requests: int = 1024
    queue_bytes: int = 256 * 2**20
    queue_wait_s: float = 30.0
    queue_tokens: int | None = None
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    admission: AdmissionSettings | None = None
    transfer: bool = False  # KV moves between workers
    disaggregate_above: int | None = None  # tokens to prefill; None: by cost
    allow_client_kv_transfer: bool = False
    client_priority: bool = False  # tenants may set `priority`
    client_arguments: bool = False  # and `vllm_xargs`
    pass_priority: bool = False  # workers get the tenant class
    transfer_within_s: float = inf  # time for a transfer after the prefill

"""What the operator chose of the router's core."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from proxy.core.queue.fairness import FairnessSettings
from proxy.core.queue.latency_admission import AdmissionSettings

# So many times what is called short had short workers better hold: sizes are estimated.
HEADROOM: Final = 2


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """All of it."""

    policy: str = "adaptive"
    short_limit: int = 10_000
    prefix_affinity: bool = True
    tokenize: bool = True
    cut_output: bool = False  # by the largest worker, where nobody has room for all of it
    max_attempts: int = 3
    retry_budget: float = 0.2
    panic_threshold: float = 0.5  # a pool's share of closed breakers below which they are ignored
    queue_requests: int = 1024
    queue_bytes: int = 256 * 2**20
    queue_wait_s: float = 30.0
    queue_tokens: int | None = None
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    admission: AdmissionSettings | None = None
    transfer: bool = False  # whether KV moves from prefill to decode workers
    disaggregate_above: int | None = None  # tokens to prefill; None: where it costs less
    allow_client_kv_transfer: bool = False
    client_priority: bool = False  # whether tenants may say `priority` themselves,
    client_arguments: bool = False  # and `vllm_xargs`
    pass_priority: bool = False  # whether workers are told the class of a tenant
    transfer_within_s: float = inf  # of a prefill's end its transfer has to be done

"""Types that are pickled for other processes or written as JSON, so they are not compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.config.tls import WorkerTlsConfig
    from proxy.core.model.role import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker as the operator configures it."""

    name: str
    url: str
    role: Role
    model: str
    max_model_len: int | None = None  # None: as the worker reports
    max_requests: int | None = None  # in flight
    api_key: str | None = field(default=None, repr=False)
    tls: WorkerTlsConfig | None = None
    seats: int | None = None  # sequences at once; None: unknown


@dataclass(slots=True)
class Gauges:
    """The last values of a worker's /metrics."""

    at: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_capacity_tokens: int | None = None  # blocks times block size
    prompt_tokens_total: float = 0.0
    generation_tokens_total: float = 0.0
    preemptions_total: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def computed(self) -> float:
        """Return the tokens computed since the worker's start."""
        return self.prompt_tokens_total + self.generation_tokens_total


@dataclass(slots=True, frozen=True)
class Score:
    """The cost of a worker for a request, in seconds."""

    worker: str
    total: float
    wait_s: float = 0.0  # for earlier requests
    prefill_s: float = 0.0  # less the cached part
    harm_s: float = 0.0  # to running requests
    cached_tokens: int = 0
    note: str = ""  # why it is no candidate
    prefill_by: str = ""  # prefill worker, if another

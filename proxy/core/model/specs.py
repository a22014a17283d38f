"""Types that leave the process, pickled or as JSON. They are not compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.core.model.role import Role

if TYPE_CHECKING:
    from proxy.config.tls import WorkerTlsConfig


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    url: str
    role: Role
    model: str
    max_model_len: int | None = None  # None: as the worker reports
    max_requests: int | None = None  # in flight
    api_key: str | None = field(default=None, repr=False)
    tls: WorkerTlsConfig | None = None
    slots: int | None = None  # sequences at once; None: unknown
    journal: tuple[str, ...] = ()  # addresses of the engines' journals


@dataclass(slots=True)
class Gauges:
    """A worker's last /metrics."""

    at: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_capacity_tokens: int | None = None
    prompt_tokens_total: float = 0.0
    generation_tokens_total: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> float:
        """Return all tokens since the start."""
        return self.prompt_tokens_total + self.generation_tokens_total


@dataclass(slots=True, frozen=True)
class Score:
    """A worker's cost for a request, in seconds."""

    worker: str
    total: float
    wait_s: float = 0.0  # for earlier requests
    prefill_s: float = 0.0  # of the part not cached
    harm_s: float = 0.0  # delay of running requests
    cached_tokens: int = 0
    cached_reported: bool = False  # by its journal; otherwise estimated
    note: str = ""
    prefill_by: str = ""  # prefill worker of a hand-over

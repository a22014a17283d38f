"""What leaves this process as it is: pickled for its siblings, or as JSON.

Such a class has to be the same for who writes it and who reads it, so none of this is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.config.tls import WorkerTlsConfig
    from proxy.core.model.role import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the operator states of a worker."""

    name: str
    url: str
    role: Role
    model: str
    max_model_len: int | None = None  # None = as the worker says
    max_requests: int | None = None  # in flight; None = no limit of its own
    api_key: str | None = field(default=None, repr=False)
    tls: WorkerTlsConfig | None = None  # None = plain HTTP
    seats: int | None = None  # sequences that it runs at once; None = it is not known


@dataclass(slots=True)
class Gauges:
    """What a worker's own /metrics said last."""

    at: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_capacity_tokens: int | None = None  # blocks times block size, where it tells
    prompt_tokens_total: float = 0.0
    generation_tokens_total: float = 0.0
    preemptions_total: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def computed(self) -> float:
        """Tokens that it has prefilled and written since it was started."""
        return self.prompt_tokens_total + self.generation_tokens_total


@dataclass(slots=True, frozen=True)
class Score:
    """What one worker would have meant for a request; seconds."""

    worker: str
    total: float
    wait_s: float = 0.0  # for what is ahead of it
    prefill_s: float = 0.0  # its own, less what is cached
    harm_s: float = 0.0  # done to those that run
    cached_tokens: int = 0
    note: str = ""  # why it was no candidate, if so
    prefill_by: str = ""  # the worker that would prefill for it, if another

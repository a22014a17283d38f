"""What the operator states of a worker, as processes of a router tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.core.types import Role

if TYPE_CHECKING:
    from proxy.config.tls import WorkerTlsConfig


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

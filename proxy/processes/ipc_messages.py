"""Messages between the supervisor and router processes.

The supervisor starts processes, appoints a leader and forwards the leader's changes of workers.
Everything else is a question to all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from proxy.config import FleetConfig
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.discovery.endpoints import Endpoints
from proxy.setup.secrets import SecretKeys

Address = tuple[int, Any]  # socket family and bound address


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message: all that a process needs to start."""

    processes: int
    started_with: FleetConfig
    config: FleetConfig  # as last read
    keys: SecretKeys  # read together with `config`
    source: Path | None
    read: Callable[[Path], FleetConfig]
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The process can become leader or receive the leader's workers."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The process listens."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Become leader: probe, discover, serve the admin port and send changes of workers."""


@dataclass(frozen=True, slots=True)
class Reload:
    """Ask the leader to read the fleet file again."""


@dataclass(frozen=True, slots=True)
class ConfigReloaded:
    """The leader read the file; the others apply it and its keys."""

    config: FleetConfig
    keys: SecretKeys


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker's state in the leader."""

    spec: WorkerSpec
    row: int | None  # in the shared table; None if charges are not shared
    since: float
    up: bool
    probed: bool
    up_since: float
    awaited_since: float
    draining: bool
    models: tuple[str, ...]
    reported_max_model_len: int | None
    gauges: Gauges | None
    pace: tuple[float, ...] | None  # None if unknown
    origins: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """Changed and removed workers of the leader, or all."""

    known: tuple[KnownWorker, ...]
    removed: tuple[str, ...] = ()
    complete: bool = False  # `known` has all workers
    warm_links: tuple[tuple[str, str], ...] = ()  # pairs with a warm connection
    discovered: Mapping[str, Endpoints] | None = None  # discovered endpoints, if changed


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """Stored responses with their workers and tenants."""

    responses: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """A worker was drained or undrained by the admin API of any host; the leader follows."""

    name: str
    draining: bool
    at_once: bool = False  # its requests move to other workers


@dataclass(frozen=True, slots=True)
class UrgentChange:
    """A change in the shared memory must not wait until small changes are published."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new requests, let requests in flight finish, and exit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Exit at once."""


QuestionKind = Literal["page", "decisions", "live", "logs", "move"]


@dataclass(frozen=True, slots=True)
class IpcQuestion:
    """A question to all processes; the supervisor collects the answers."""

    number: int
    kind: QuestionKind
    argument: Any = None


@dataclass(frozen=True, slots=True)
class IpcAnswer:
    """The answer to the question of that number."""

    number: int
    result: Any = None
    failed: bool = False  # the process cannot answer; its log has the reason


Message: TypeAlias = (
    Begin | Joined | Serving | Lead | Reload | ConfigReloaded | WorkersChanged | StoredResponses
    | WorkerDrained | UrgentChange | Drain | Stop | IpcQuestion | IpcAnswer
)  # fmt: skip

"""What the supervisor and its processes say to each other.

The supervisor begins a process, has one of them lead, and passes on what the leader says of the
workers; all else is asked of everybody and answered.
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

Address = tuple[int, Any]  # a socket's family, and what it is bound to


@dataclass(frozen=True, slots=True)
class Begin:
    """The supervisor's first words."""

    processes: int
    started_with: FleetConfig
    config: FleetConfig  # as it was read last
    keys: SecretKeys  # and what the files that it names held then
    source: Path | None
    read: Callable[[Path], FleetConfig]
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """A process is there: it can lead, or be told who the workers are."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A process listens."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Probe, discover, have the admin port, and tell the others who the workers are."""


@dataclass(frozen=True, slots=True)
class Reload:
    """To the leader: read the fleet file again."""


@dataclass(frozen=True, slots=True)
class ConfigReloaded:
    """The leader did; the others are to take it, and the keys that it read."""

    config: FleetConfig
    keys: SecretKeys


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker as the leader knows it."""

    spec: WorkerSpec
    row: int | None  # in the table; None: its charges are not shared
    since: float
    up: bool
    probed: bool
    up_since: float
    awaited_since: float
    draining: bool
    models: tuple[str, ...]
    told_max_model_len: int | None
    gauges: Gauges | None
    pace: tuple[float, ...] | None  # None: nothing was learnt
    origins: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """What the leader says of workers: those that changed, and who is gone; or all there are."""

    known: tuple[KnownWorker, ...]
    gone: tuple[str, ...] = ()
    all: bool = False
    warm: tuple[tuple[str, str], ...] = ()  # pairs between which transfers are ready
    found: Mapping[str, Endpoints] | None = None  # by discovery, where that has changed


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """Stored responses, the workers that hold them, and whose they are; for all others."""

    responses: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new, let requests finish, end."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End now."""


What = Literal["page", "decisions", "minute", "logs"]


@dataclass(frozen=True, slots=True)
class IpcQuestion:
    """A question to all processes; the supervisor puts it, and for a page gives the sum."""

    number: int
    what: What
    given: Any = None


@dataclass(frozen=True, slots=True)
class IpcAnswer:
    """An answer, to a question of that number."""

    number: int
    found: Any


@dataclass(frozen=True, slots=True)
class IpcNoAnswer:
    """To that question there will be no answer; why is in the log of whoever has none."""

    number: int


Message: TypeAlias = (
    Begin
    | Joined
    | Serving
    | Lead
    | Reload
    | ConfigReloaded
    | WorkersChanged
    | StoredResponses
    | Drain
    | Stop
    | IpcQuestion
    | IpcAnswer
    | IpcNoAnswer
)

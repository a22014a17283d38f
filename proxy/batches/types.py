"""Types of the batch API: files, batches, lines and results.

    validating -> in_progress -> finalizing -> completed
        |             |  \
        v             v   +-> cancelling -> cancelled
      failed       expired

The statuses are OpenAI's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from proxy.errors import ProxyError

INPUT, OUTPUT = "batch", "batch_output"  # the purposes of files, in OpenAI's words
MAX_CUSTOM_ID_CHARS = 512  # of a line's custom_id


class DiskError(ProxyError):
    """The store's folder is unusable; the message names a remedy."""


class StoreFullError(DiskError):
    """The disk or a limit is full; nothing of the write was kept."""


class TenantLimitError(ProxyError):
    def __init__(self, message: str, *, later: bool) -> None:
        super().__init__(message)
        self.later = later  # the same request may succeed later


class InUseError(ProxyError):
    """A file that an active batch reads cannot be deleted."""


class Status(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"  # the input is invalid; no line ran
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ACTIVE = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)


@dataclass(frozen=True, slots=True)
class InputProblem:
    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request of an input file, with its body's position."""

    number: int
    custom_id: str
    model: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class LineJob:
    batch: str
    number: int
    custom_id: str
    model: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineResult:
    """The outcome of a line: a response, or an error code and message."""

    batch: str
    number: int
    custom_id: str
    request_id: str
    status: int = 0  # of the response; 0 without a response
    body: bytes = b""
    code: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        """True if the result belongs in the output file; False for the error file."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class File:
    id: str
    tenant: str
    name: str
    purpose: str
    created: float
    expires: float
    bytes: int
    batch: str | None = None  # the batch of the results in the file
    ok: bool = True  # True: the batch's responses; False: its errors


@dataclass(slots=True)
class Batch:
    """A batch. Times are in seconds since 1970."""

    id: str
    tenant: str
    endpoint: str
    input: str
    window: str  # as given by the client: 24h
    status: Status
    created: float
    expires: float
    metadata: dict[str, str] | None = None
    problems: list[InputProblem] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output: str | None = None
    error: str | None = None
    at: dict[str, float] = field(default_factory=dict)  # when each status was reached

    @property
    def active(self) -> bool:
        return self.status in ACTIVE


Json = dict[str, Any]

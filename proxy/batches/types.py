"""What a batch is made of.

    validating -> in_progress -> finalizing -> completed
        |             |  \
        v             v   +-> cancelling -> cancelled
      failed       expired

The states and their names are OpenAI's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from proxy.errors import ProxyError

INPUT, OUTPUT = "batch", "batch_output"  # the purposes of files, in OpenAI's words
LONGEST_ID = 512  # of a line, given by the client


class DiskError(ProxyError):
    """The store's folder can't be used now; the message names the folder and a remedy."""


class StoreFullError(DiskError):
    """The disk did not take what was to be kept; nothing of it was kept."""


class TenantLimitError(ProxyError):
    """A tenant has as much as one may have."""

    def __init__(self, message: str, *, later: bool) -> None:
        super().__init__(message)
        self.later = later  # it may come again with the same


class InUseError(ProxyError):
    """A file that a batch still reads."""


class Status(StrEnum):
    """How far a batch is."""

    VALIDATING = "validating"
    FAILED = "failed"  # its input can't be run; nothing was
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


# Somebody has still to do something about them.
ACTIVE = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)


@dataclass(frozen=True, slots=True)
class InputProblem:
    """What is wrong with an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request of an input file: where in the file its body is."""

    number: int
    custom_id: str
    model: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class LineJob:
    """A line to be run."""

    batch: str
    number: int
    custom_id: str
    model: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of a line: an answer, or why there is none."""

    batch: str
    number: int
    custom_id: str
    request_id: str
    status: int = 0  # of the answer; 0 where there is none
    body: bytes = b""
    code: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether it belongs in the output file, not in the error file."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class File:
    """A file, without its content."""

    id: str
    tenant: str
    name: str
    purpose: str
    created: float
    expires: float
    bytes: int
    batch: str | None = None  # whose results it shows
    ok: bool = True  # of those, the answers; else the failures


@dataclass(slots=True)
class Batch:
    """A batch. Times are seconds since 1970; None where it has not come to that."""

    id: str
    tenant: str
    endpoint: str
    input: str
    window: str  # as the client said it
    status: Status
    created: float
    expires: float
    metadata: dict[str, str] | None = None
    complaints: list[InputProblem] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output: str | None = None
    error: str | None = None
    at: dict[str, float] = field(default_factory=dict)  # when it came to each state

    @property
    def active(self) -> bool:
        """Whether it is not over."""
        return self.status in ACTIVE


Json = dict[str, Any]

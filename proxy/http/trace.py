"""The W3C trace context of a request."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import getrandbits
from typing import NamedTuple

# Version, trace, span, flags. Zeros and version ff are invalid.
TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
SAMPLED = 1


class WorkerSpan(NamedTuple):
    """The span of one request to a worker."""

    span: int
    worker: str
    role: str
    at_ns: int


@dataclass(slots=True)
class Trace:
    trace: int
    parent: int | None  # the client's span
    span: int
    sampled: bool
    legs: list[WorkerSpan]
    clock_ns: Callable[[], int] = time.time_ns

    @classmethod
    def begin(cls, header: bytes | None, *, sample: bool) -> Trace:
        """Continue the client's trace and its sampling, or begin a trace."""
        match = TRACEPARENT.fullmatch(header) if header else None
        if match is None:
            return cls(new_id(128), None, new_id(64), sample, [])
        wanted = bool(int(match[3], 16) & SAMPLED)
        return cls(int(match[1], 16), int(match[2], 16), new_id(64), wanted, [])

    @property
    def id(self) -> str:
        return f"{self.trace:032x}"

    def leg(self, worker: str, role: str) -> bytes:
        """Record a worker request; return its traceparent header."""
        span = new_id(64)
        if self.sampled:
            self.legs.append(WorkerSpan(span, worker, role, self.clock_ns()))
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace, span, self.sampled)


def new_id(bits: int) -> int:
    """Return a random id. It is not a secret."""
    return getrandbits(bits) or 1


def id_in(header: bytes | None) -> str:
    match = TRACEPARENT.fullmatch(header) if header else None
    return match[1].decode() if match else ""

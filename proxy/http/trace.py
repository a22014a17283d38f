"""The trace that a request belongs to, in the W3C's words: who asked, and whom we asked in turn."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import getrandbits
from typing import NamedTuple

# Version, trace, span, flags; all zeros are no id, and ff is no version.
TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
SAMPLED = 1


class WorkerSpan(NamedTuple):
    """A request to a worker, as it was sent."""

    span: int
    worker: str
    role: str
    at_ns: int


@dataclass(slots=True)
class Trace:
    """One request's."""

    trace: int
    parent: int | None  # the client's span, if it has one
    span: int
    sampled: bool
    legs: list[WorkerSpan]
    clock_ns: Callable[[], int] = time.time_ns

    @classmethod
    def begin(cls, told: bytes | None, *, sample: bool) -> Trace:
        """Go on with a client's trace, whose word on sampling is kept, or begin one."""
        found = TRACEPARENT.fullmatch(told) if told else None
        if found is None:
            return cls(new_id(128), None, new_id(64), sample, [])
        wanted = bool(int(found[3], 16) & SAMPLED)
        return cls(int(found[1], 16), int(found[2], 16), new_id(64), wanted, [])

    @property
    def id(self) -> str:
        """The trace, as people look for it."""
        return f"{self.trace:032x}"

    def leg(self, worker: str, role: str) -> bytes:
        """Note that a worker is asked; return the header that tells it so."""
        span = new_id(64)
        if self.sampled:
            self.legs.append(WorkerSpan(span, worker, role, self.clock_ns()))
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace, span, self.sampled)


def new_id(bits: int) -> int:
    """Make an id that nobody else has; it need not be hard to guess."""
    return getrandbits(bits) or 1


def id_in(told: bytes | None) -> str:
    """Return the trace that a header names, or nothing."""
    found = TRACEPARENT.fullmatch(told) if told else None
    return found[1].decode() if found else ""

"""The roles of workers."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    SHORT = "short"
    LONG = "long"
    GENERAL = "general"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def can_serve(self) -> bool:
        """Return whether the worker may serve whole requests."""
        return self is not Role.PREFILL

"""The roles of workers."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The requests that a worker is for."""

    SHORT = "short"
    LONG = "long"
    GENERAL = "general"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def serves_whole(self) -> bool:
        """True if the worker may serve a request from its prompt to its last token."""
        return self is not Role.PREFILL

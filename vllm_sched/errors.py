"""The exceptions of this project.

VllmSchedError
├── UsageError        an invalid name, key, value or combination; exit status 2
└── UnsupportedVllmError  a vLLM outside the tested range, or without a method that we override
"""

from __future__ import annotations


class VllmSchedError(Exception):
    """Base class of all errors that this project raises."""


class UsageError(VllmSchedError, ValueError):
    """The user's input is invalid; the message names the value, the limit and the remedy."""


class UnsupportedVllmError(VllmSchedError, ImportError):
    """The installed vLLM is not a tested version."""

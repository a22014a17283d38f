"""What can go wrong, as one tree.

VllmSchedError
├── UsageError        a name, key, value or combination that can't be used; exit status 2
└── UnsupportedVllmError  a vLLM outside the tested range, or without a seam we stand on
"""

from __future__ import annotations


class VllmSchedError(Exception):
    """Anything this project raises on purpose."""


class UsageError(VllmSchedError, ValueError):
    """What the user gave can't be used; the message names it, the limit and the remedy."""


class UnsupportedVllmError(VllmSchedError, ImportError):
    """The installed vLLM is not one these schedulers were tested on."""

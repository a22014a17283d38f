"""The base classes of errors, and how messages shorten names.

ProxyError
└── ConfigError    an invalid fleet file, with all its problems; exit status 2
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

MAX_NAMES, MAX_NAME_CHARS = 10, 100  # in a message


class ProxyError(Exception):
    """The base of all errors that the router raises."""


@dataclass(frozen=True)
class Problem:
    """One error in a fleet file."""

    path: str  # as in `workers[1].url`; empty for the whole file
    message: str  # the value, what is wrong, the limit and the remedy
    name: str = ""  # of the tenant, worker or pool that the path counts

    def __str__(self) -> str:
        path = f"{self.path} ({self.name})" if self.name else self.path
        return f"{path}: {self.message}" if path else self.message


class ConfigError(ProxyError, ValueError):
    """An invalid fleet file."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))


def short_list(names: Collection[str], limit: int = MAX_NAMES) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(short(name) for name in islice(names, limit))
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def short(name: str) -> str:
    """Return a name, shortened for a message."""
    return name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."

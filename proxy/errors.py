"""What can go wrong, as one tree; and how much of it is told.

ProxyError
└── ConfigError    a fleet file that can't be used: all its problems at once; exit status 2
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

NAMES_IN_MESSAGE, LONGEST_NAME = 10, 100  # names, and characters of each


class ProxyError(Exception):
    """Anything the router raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a fleet file."""

    path: str  # where in the YAML, as in `workers[1].url`; empty for the file as a whole
    message: str  # the value, what is wrong with it, the limit, and the remedy

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ProxyError, ValueError):
    """A fleet file that can't be used."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))


def a_few(names: Collection[str], most: int = NAMES_IN_MESSAGE) -> str:
    """Return the first names for a message, `most` at most, and the number of the others."""
    shown = ", ".join(short(name) for name in islice(names, most))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def short(name: str) -> str:
    """Return a name as a message shows it."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."

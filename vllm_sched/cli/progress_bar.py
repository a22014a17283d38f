"""How far a command is: a bar where there is a terminal, else a line now and then.

Lines go to stderr, and so does the bar where stdout is no terminal: what is piped on is the result.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Final

from rich.console import Console

EVERY_S: Final = 10.0


def terminal(console: Console) -> Console | None:
    """Return where a bar can be drawn: on this console, or on stderr."""
    for each in (console, Console(markup=False, stderr=True)):
        # A variable may have rich take a pipe for a terminal, for the colours; a bar it has not.
        if each.is_terminal and not each.is_dumb_terminal and each.file.isatty():
            return each
    return None


class ProgressLines:
    """Tells in lines."""

    def __init__(self, command: str) -> None:
        self._head = f"vllm-sched {command}: "
        self._latest = time.monotonic()

    def say(self, text: str) -> None:
        """Print it now."""
        self._latest = time.monotonic()
        if sys.stderr is None:  # it was closed; print would take stdout, which has the result
            return
        # Who reads along may leave: that is no reason to end a measurement.
        with suppress(OSError, ValueError):
            print(f"{self._head}{text}", file=sys.stderr, flush=True)

    def tell(self, text: str) -> None:
        """Print it unless something was printed of late."""
        if time.monotonic() >= self._latest + EVERY_S:
            self.say(text)

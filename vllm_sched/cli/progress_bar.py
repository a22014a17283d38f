"""The progress of a command: a bar on a terminal, otherwise a line every ten seconds.

Lines go to stderr. The bar does too if stdout is not a terminal, so that a pipe gets only results.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Final

from rich.console import Console

LINE_INTERVAL_S: Final = 10.0


def terminal(console: Console) -> Console | None:
    """Return a console that can draw a bar: this one or stderr; None if neither can."""
    for each in (console, Console(markup=False, stderr=True)):
        # rich takes a pipe for a terminal if FORCE_COLOR is set.
        if each.is_terminal and not each.is_dumb_terminal and each.file.isatty():
            return each
    return None


class ProgressLines:
    """Prints progress as lines."""

    def __init__(self, command: str) -> None:
        self._head = f"vllm-sched {command}: "
        self._latest = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line now."""
        self._latest = time.monotonic()
        if sys.stderr is None:  # stderr is closed: `print` would write to stdout instead
            return
        # A closed pipe must not end a measurement.
        with suppress(OSError, ValueError):
            print(f"{self._head}{text}", file=sys.stderr, flush=True)

    def tell(self, text: str) -> None:
        """Print a line unless another was printed in the last `LINE_INTERVAL_S` seconds."""
        if time.monotonic() >= self._latest + LINE_INTERVAL_S:
            self.say(text)

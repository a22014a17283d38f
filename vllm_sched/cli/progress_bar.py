"""The progress of a command: a bar on a terminal, otherwise a line every ten seconds.

Lines go to stderr. The bar does too if stdout is not a terminal, so that a pipe gets only results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_sched.cli.output import Output

LINE_INTERVAL_S: Final = 10.0


def terminal(console: Console) -> Console | None:
    """Return a console that can draw a bar: this one or stderr; None if neither can."""
    for output in (console, Output(stderr=True)):
        # rich takes a pipe for a terminal if FORCE_COLOR is set.
        if output.is_terminal and not output.is_dumb_terminal and output.file.isatty():
            return output
    return None


class ProgressLines:
    def __init__(self, command: str) -> None:
        self._head = f"vllm-sched {command}: "
        self._latest = time.monotonic()

    def print_line(self, text: str) -> None:
        self._latest = time.monotonic()
        # A closed pipe must not end a measurement.
        with suppress(OSError, ValueError):
            print(f"{self._head}{text}", file=sys.stderr, flush=True)

    def print_sometimes(self, text: str) -> None:
        """Print a line unless another was printed in the last `LINE_INTERVAL_S` seconds."""
        if time.monotonic() >= self._latest + LINE_INTERVAL_S:
            self.print_line(text)


class ShowProgress(Protocol):
    def __call__(self, completed: float, state: str, *, line: str = "", last: bool = False) -> None:
        """Show a state; `line` is its text without a terminal, where the `last` is always shown."""


@contextmanager
def progress(
    console: Console,
    command: str,
    label: str,
    total: float | None,
    *,
    more: str = "",
    refreshes: bool = True,
) -> Iterator[ShowProgress]:
    """Yield a function that shows progress; `more` is added to the first line, not to the bar.

    Unless it `refreshes` by itself, the bar is drawn at each call only.
    """
    if (place := terminal(console)) is None:
        lines = ProgressLines(command)
        lines.print_line(label + more)

        def tell(completed: float, state: str, *, line: str = "", last: bool = False) -> None:
            del completed
            (lines.print_line if last else lines.print_sometimes)(line or state)

        yield tell
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(30), TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", style="dim"),
    )  # fmt: skip
    with Progress(*columns, console=place, auto_refresh=refreshes, transient=True) as bar:
        task = bar.add_task(label, total=total, state="")

        def show(completed: float, state: str, *, line: str = "", last: bool = False) -> None:
            del line, last
            bar.update(task, completed=completed, state=state, refresh=not refreshes)

        yield show

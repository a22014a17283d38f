"""How a command that fails or is stopped ends: exit statuses and signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

CLOSED_OUTPUT = 1
BAD_USAGE = 2
INTERRUPTED = 130  # a shell's status for Ctrl-C
# The last error of standard output that did not end the command; `main` reports it at the end.
lost_output: Final[list[OSError]] = []


class OutputError(OSError):
    """Standard output cannot be written."""


class StandardOutput:
    """Standard output. Its errors differ from those of files, which have the same numbers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _as_output_error():
            return self._stream.write(text)

    def flush(self) -> None:
        with _as_output_error():
            self._stream.flush()


@contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from None


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM and a closed terminal's SIGHUP, unless `nohup` ignores it, like Ctrl-C."""

    def pass_on(*_: object) -> None:
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)  # runs the current handler
        else:  # SIGINT is ignored in a shell's background jobs
            raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if number == signal.SIGTERM or handler != signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hangup_waits() -> Iterator[None]:
    """Keep a SIGHUP until the router has a handler for it: a reload during the start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C came; a second Ctrl-C ends the command.

    A command can then show and save the results that it has.
    """
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)

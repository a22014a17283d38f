"""How a command ends that did not do what it was asked for: its status, and the signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

BAD_USAGE = 2
INTERRUPTED = 130  # as a shell reports of what Ctrl-C ended


@contextmanager
def terminated_alike() -> Iterator[None]:
    """Take SIGTERM, by which `timeout`, CI and containers end a command, for a Ctrl-C."""

    def pass_on(*_: object) -> None:
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)  # whoever minds it now
        else:  # a shell's background jobs ignore it
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, pass_on)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Tell whether Ctrl-C came, so that a part of a run can be shown and kept; twice ends it."""
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: came
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, before)

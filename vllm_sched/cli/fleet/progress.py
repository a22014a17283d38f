"""The state of starting workers: a live table on a terminal, otherwise lines of text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from vllm_sched.workers.supervise import KeeperEvent, KeeperState

# This number of deaths in a row is a crash loop. The log's end is shown at the first death and at
# this one.
CRASH_LOOP_DEATHS = 3
# rich raises SystemExit on a broken pipe, which must not end the thread that supervises a worker.
READER_ERRORS = (OSError, SystemExit)
COLOURS = {KeeperState.READY: "green", KeeperState.DIED: "red", KeeperState.STARTING: "cyan"}


@dataclass
class _Row:
    state: KeeperState = KeeperState.QUEUED
    since: float = 0.0
    took: float | None = None  # seconds that the start took; None while the state goes on
    ready: bool = False  # was ready at least once


class Progress:
    """Shows `KeeperEvent` from any thread; a context manager around the whole run."""

    def __init__(
        self,
        console: Console,
        logs: Mapping[str, Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._logs = logs
        self._clock = clock
        self._began = clock()
        self._rows = {name: _Row(since=self._began) for name in logs}
        self._lock = threading.Lock()
        self._live: Live | None = None

    def show(self, event: KeeperEvent) -> None:
        with self._lock, suppress(*READER_ERRORS):
            row = self._rows[event.worker]
            row.state, row.since = event.state, self._clock()
            row.took = event.seconds if event.state is KeeperState.READY else None
            self._write(event)
            if event.state is KeeperState.READY and not row.ready:
                row.ready = True
                if all(row.ready for row in self._rows.values()):
                    self._all_ready()
            if all(row.state is KeeperState.STOPPED for row in self._rows.values()):
                self._line("all workers have stopped", "dim")

    def print_line(self, text: str) -> None:
        with self._lock, suppress(*READER_ERRORS):
            self._line(text, "dim")

    def _write(self, event: KeeperEvent) -> None:
        name = event.worker
        if event.state is KeeperState.DIED:
            self._line(_death_text(event, self._logs[name]), "red")
        elif self._live is None:
            if event.state is KeeperState.STARTING:
                self._line(f"{name}: starting; log: {self._logs[name]}", "dim")
            elif event.state is KeeperState.READY:
                self._line(f"{name}: ready after {event.seconds:.0f} s", "green")

    def _all_ready(self) -> None:
        self._end_live()
        seconds = self._clock() - self._began
        count = len(self._rows)
        what = "the worker is" if count == 1 else f"all {count} workers are"
        self._line(f"{what} ready after {seconds:.0f} s", "green")

    def _line(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        now = self._clock()
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim", overflow="fold")
        for name, row in self._rows.items():
            seconds = now - row.since if row.took is None else row.took
            state = f"[{COLOURS.get(row.state, 'dim')}]{row.state}[/]"
            table.add_row(name, state, f"{seconds:.0f} s", str(self._logs[name]))
        return table

    def _end_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Few refreshes: the router lives in this process too.
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock, suppress(*READER_ERRORS):
            self._end_live()


def _death_text(event: KeeperEvent, log: Path) -> str:
    what, *tail = event.error.splitlines()
    what = what.removesuffix("; the end of its log:")
    loop = (
        f"crash loop, {event.deaths} deaths in a row: " if event.deaths >= CRASH_LOOP_DEATHS else ""
    )
    head = f"{loop}{what} after {event.seconds:.0f} s; restart in {event.again_s:g} s; log: {log}"
    return "\n    ".join([head, *tail]) if event.deaths in (1, CRASH_LOOP_DEATHS) else head

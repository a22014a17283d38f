"""The output while workers start, and when a worker dies."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from vllm_sched.cli.fleet.progress import Progress
from vllm_sched.workers.supervise import KeeperEvent, KeeperState

LOGS = {"a": Path("/logs/a.log"), "b": Path("/logs/b.log")}
CRASH = "a died with exit code 3; the end of its log:\none\ntwo"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def printed(*event: KeeperEvent, terminal: bool = False, width: int = 200) -> str:
    """Return the output for these events, one second apart."""
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, height=50
    )
    clock = Clock()
    with Progress(console, LOGS, clock) as progress:
        for item in event:
            clock.now += 1
            progress.show(item)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def died(deaths: int, again_s: float = 1.0) -> KeeperEvent:
    return KeeperEvent("a", KeeperState.DIED, 12.3, CRASH, deaths, again_s)


def test_output_without_a_terminal_is_plain_lines() -> None:
    text = printed(
        KeeperEvent("a", KeeperState.QUEUED),
        KeeperEvent("a", KeeperState.STARTING),
        KeeperEvent("b", KeeperState.STARTING),
        KeeperEvent("b", KeeperState.READY, 20.4),
        KeeperEvent("a", KeeperState.READY, 30.6),
    )
    assert text.splitlines() == [
        "a: starting; log: /logs/a.log",
        "b: starting; log: /logs/b.log",
        "b: ready after 20 s",
        "a: ready after 31 s",
        "all 2 workers are ready after 5 s",
    ]
    # Lines are not wrapped, and the end is printed.
    narrow = printed(KeeperEvent("a", KeeperState.STARTING), width=10)
    assert narrow == "a: starting; log: /logs/a.log\n"
    ready = [KeeperEvent(name, KeeperState.READY, 1.0) for name in ("a", "b", "a")]
    assert printed(*ready).count("all 2 workers are ready") == 1
    stopped = printed(*(KeeperEvent(name, KeeperState.STOPPED) for name in "ab"))
    assert stopped == "all workers have stopped\n"


def test_first_death_and_crash_loop_show_the_log() -> None:
    lines = printed(died(1)).splitlines()
    assert lines[0] == "a died with exit code 3 after 12 s; restart in 1 s; log: /logs/a.log"
    assert lines[1:] == ["    one", "    two"]
    assert printed(died(2)).count("\n") == 1
    loop = printed(died(3, 4.0)).splitlines()
    assert loop[0].startswith("crash loop, 3 deaths in a row: a died with exit code 3")
    assert loop[0].endswith("restart in 4 s; log: /logs/a.log")
    assert loop[-1] == "    two"
    assert printed(died(4)).startswith("crash loop, 4 deaths")
    assert printed(died(4)).count("\n") == 1


def test_terminal_shows_a_table_until_all_are_ready() -> None:
    text = printed(
        KeeperEvent("a", KeeperState.STARTING),
        died(1),
        KeeperEvent("a", KeeperState.READY, 7.0),
        KeeperEvent("b", KeeperState.READY, 9.0),
        died(1),
        terminal=True,
    )
    table, _, after = text.partition("all 2 workers are ready after 4 s")
    assert "a died with exit code 3" in table
    assert re.search(r"a +ready +7 s +/logs/a.log *\n.*b +ready +9 s +/logs/b.log", table)
    assert "a: ready after" not in table
    assert after.splitlines()[1].startswith("a died")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), SystemExit(1)])
def test_closed_output_is_not_an_error(error: BaseException) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    progress = Progress(Console(file=Gone(), force_terminal=False), LOGS)
    progress.show(KeeperEvent("a", KeeperState.STARTING))

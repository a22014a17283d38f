"""Bars are for terminals, and lines for everybody else."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from vllm_sched.cli import progress_bar


class Terminal(io.StringIO):
    """Somebody sits in front of it."""

    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """Nobody reads it any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_bar_is_drawn_where_somebody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, piped = Console(file=Terminal()), Console(file=io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress_bar.terminal(seen) is seen
    assert progress_bar.terminal(piped) is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    beside = progress_bar.terminal(piped)
    assert beside is not None
    assert beside.file is sys.stderr


def test_colours_that_are_asked_for_make_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert progress_bar.terminal(Console(file=io.StringIO())) is None
    monkeypatch.setenv("TERM", "dumb")
    assert progress_bar.terminal(Console(file=Terminal())) is None


def test_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("vllm_sched.cli.progress_bar.time.monotonic", lambda: now)
    lines = progress_bar.ProgressLines("bench")
    lines.tell("too soon")
    lines.say("begins")
    for now in (109.0, 110.0, 119.9, 120.0):
        lines.tell(f"at {now:g}")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "vllm-sched bench: begins", "vllm-sched bench: at 110", "vllm-sched bench: at 120",
    ]  # fmt: skip


def test_without_a_stderr_nothing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who closes it (`2>&-`) is not to find our lines in the result."""
    monkeypatch.setattr(sys, "stderr", None)
    progress_bar.ProgressLines("bench").say("anything")
    assert progress_bar.terminal(Console(file=io.StringIO())) is None
    assert capsys.readouterr().out == ""


def test_a_reader_who_left_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    progress_bar.ProgressLines("bench").say("anything")

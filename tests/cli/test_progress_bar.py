"""Progress is a bar on a terminal, and lines otherwise."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from vllm_sched.cli import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, piped = Console(file=Terminal()), Console(file=io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress_bar.terminal(seen) is seen
    assert progress_bar.terminal(piped) is None
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    beside = progress_bar.terminal(piped)
    assert beside is not None
    beside.print("a bar")
    assert "a bar" in stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes no terminal
    assert progress_bar.terminal(Console(file=io.StringIO())) is None
    monkeypatch.setenv("TERM", "dumb")
    assert progress_bar.terminal(Console(file=Terminal())) is None


def test_closed_pipe_is_ignored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedPipe())
    progress_bar.ProgressLines("bench").print_line("anything")
    assert progress_bar.terminal(Console(file=io.StringIO())) is None
    assert capsys.readouterr().out == ""


def test_lines_are_printed_at_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("vllm_sched.cli.progress_bar.time.monotonic", lambda: now)
    lines = progress_bar.ProgressLines("bench")
    lines.print_sometimes("too soon")
    lines.print_line("begins")
    for now in (109.0, 110.0, 119.9, 120.0):
        lines.print_sometimes(f"at {now:g}")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "vllm-sched bench: begins", "vllm-sched bench: at 110", "vllm-sched bench: at 120",
    ]  # fmt: skip

"""Commands that run in the test's process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from vllm_sched.cli.main import main


class Printed(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def words(self) -> str:
        """The output as one line."""
        return " ".join(self.out.split())


class Program:
    """Runs `vllm-sched`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, status: int = 0) -> Printed:
        """Run a command, which must end with this status."""
        self._capsys.readouterr()
        assert main([str(word) for word in words]) == status
        return Printed(*self._capsys.readouterr())

    def refusal(self, *words: object, status: int = 2) -> str:
        """Return the only line that a refused command prints."""
        printed = self(*words, status=status)
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(f"vllm-sched {words[0]}: ")
        return line

"""What commands print, and the files that they write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

from rich.console import Console
from rich.table import Table

from vllm_sched.cli.exits import lost_output
from vllm_sched.errors import UsageError

MIN_TABLE_WIDTH: Final = 80


def require_folders(*paths: Path | None) -> None:
    """Raise `UsageError` for a folder or a file that can't be written; None is skipped."""
    for path in filter(None, paths):
        folder = path.parent
        if _is_folder(path):
            raise UsageError(f"{path}: is a folder; name a file in it")
        if not _is_folder(folder):
            raise UsageError(f"{path}: there is no folder {folder}; make it first")
        _require_writable(path, path if _is_there(path) else folder)


def require_place(folder: Path) -> None:
    """Raise `UsageError` unless a folder for pictures exists or can be created."""
    existing = next(parent for parent in (folder, *folder.parents) if _is_there(parent))
    if not _is_folder(existing):
        raise UsageError(f"--plot {folder}: {existing} is a file; name a folder for the pictures")
    _require_writable(folder, existing)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write, such as to a full disk, into a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def _is_there(path: Path) -> bool:
    return os.access(path, os.F_OK)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no permission to look
        return False


def _require_writable(path: Path, existing: Path) -> None:
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{path}: {existing} is not writable; choose another place")


class LastingStream:
    """A stream whose last error goes to a list: a command without a reader saves its results."""

    def __init__(self, stream: IO[str], failures: list[OSError]) -> None:
        self._stream = stream
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._failures[:] = [error]

    def flush(self) -> None:
        """Do nothing: each write was flushed."""


class Output(Console):
    """Standard output or error: tables, and lines that are not cut to the terminal's width."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        stream, failures = (sys.stderr, []) if stderr else (sys.stdout, lost_output)
        file = None if stream is None else cast("IO[str]", LastingStream(stream, failures))
        super().__init__(file=file, stderr=stderr, width=width, markup=False, highlight=False)

    def print_table(self, table: Table) -> None:
        """Print a table for at least `MIN_TABLE_WIDTH` columns: less would cut off digits."""
        Output(width=max(self.width, MIN_TABLE_WIDTH)).print(table)

    def print_text(self, text: str, style: str = "dim") -> None:
        self.print(text, style=style, soft_wrap=True)

    def save(
        self, path: Path | None, write: Callable[[Path], Iterable[Path] | None], verb: str = "saved"
    ) -> None:
        """Write and report the file of an option; `write` may return the files that it wrote."""
        if path is not None:
            with writing(path):
                written = write(path)
            for file in (path,) if written is None else written:
                self.print_text(f"{verb} {file}")

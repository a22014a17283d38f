"""What commands print, and the files that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console

from vllm_sched.cli.paths import writing


class Output(Console):
    """Standard output: tables, and lines that are not cut to the terminal's width."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False)

    def say(self, text: str, style: str = "dim") -> None:
        self.print(text, style=style, soft_wrap=True)

    def save(
        self, path: Path | None, write: Callable[[Path], Iterable[Path] | None], verb: str = "saved"
    ) -> None:
        """Write and report the file of an option; `write` may return the files that it wrote."""
        if path is not None:
            with writing(path):
                written = write(path)
            for each in written or (path,):
                self.say(f"{verb} {each}")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns, for `grep`; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )

"""A measured figure and its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Promise:
    """A figure and its bound, in the unit that `what` names."""

    what: str
    measured: float | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def kept(self) -> bool:
        """True if the figure was measured and is within its bound."""
        if self.measured is None:
            return False
        above = self.at_most is not None and self.measured > self.at_most
        below = self.at_least is not None and self.measured < self.at_least
        return not above and not below

    @property
    def bound(self) -> str:
        """The bound as text."""
        limits = (("at most", self.at_most), ("at least", self.at_least))
        return ", ".join(f"{words} {limit:.3g}" for words, limit in limits if limit is not None)


def to_json(promises: Sequence[Promise]) -> list[dict[str, Any]]:
    return [{**asdict(promise), "kept": promise.kept} for promise in promises]


def table(title: str, promises: Sequence[Promise]) -> Table:
    layout = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "measured", "promised", ""):
        layout.add_column(heading, justify="right" if heading == "measured" else "left")
    for promise in promises:
        verdict = "kept" if promise.kept else "missed"
        layout.add_row(
            promise.what,
            "-" if promise.measured is None else f"{promise.measured:.3g}",
            promise.bound,
            verdict if promise.bound else "",  # a figure for comparison
            style=None if not promise.bound else "green" if promise.kept else "red",
        )
    return layout

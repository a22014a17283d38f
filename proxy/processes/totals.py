"""The metrics of all processes together, of those that are late or no more too.

What the dead counted of workers that are gone as well is dropped once no process shows it: each pod
is a name of its own, and nobody else would ever forget it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.control.scrape import PROCESSES, RESTARTS
from proxy.processes import pages

if TYPE_CHECKING:
    from collections.abc import Mapping


class Totals:
    """What each process said last, and what those said that ended."""

    def __init__(self) -> None:
        self._pages: dict[int, pages.Page] = {}
        self._past: pages.Page = {}

    def gone(self, index: int) -> None:
        """Keep what a process had counted when it ended."""
        last = self._pages.pop(index, None)
        if last is not None:
            self._past = pages.add_up([self._past, pages.lasting(last)])

    def page(
        self,
        found: Mapping[int, str],
        *,
        serving: int,
        restarts: int,
        openmetrics: bool,
    ) -> tuple[bytes, str]:
        """Add up what those that are there say now, or said last where they did not answer."""
        told = {index: pages.read(text) for index, text in found.items()}
        late = [page for index, page in self._pages.items() if index not in told]
        self._pages.update(told)
        total = pages.add_up([*told.values(), *late])
        if self._past:
            self._past = pages.without_strangers(self._past, total)
            total = pages.add_up([total, self._past])
        for family, name, value in (
            (PROCESSES, PROCESSES.name, serving),
            (RESTARTS, f"{RESTARTS.name}_total", restarts),
        ):
            total[name] = pages.Family(family.kind, family.help, {name: value})
        return pages.write(total, openmetrics=openmetrics)

"""Which prefill workers are connected to which decode workers, and which of them had better not be.

The first transfer between two workers takes a handshake, seconds perhaps, that no user should pay.
Somebody makes the connections (`control/warmup`) and says so here; for a while after either of two
has come up they are given no hand-over between them until that is done.

A link whose transfers fail or come late, and a prefill worker whose answers name nothing to fetch,
make each prompt be prefilled twice; one that refuses what others then serve is idle, so it is given
the next too. After a few in a row they are left alone for a while; then the next one tells whether
that goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from proxy.core.worker import Worker

PATIENCE_S = 10.0
STRIKES = 3  # in a row
BARRED_S = 60.0
Lives = tuple[float, float]  # since when each of two is up
Link = tuple[Worker, Worker | None]  # None: whichever decode worker


@dataclass(slots=True)
class Strikes:
    """What went wrong between two, in a row."""

    lives: Lives
    count: int = 0
    until: float = 0.0


class Links:
    """The connections between workers."""

    def __init__(self) -> None:
        self.are_made = False  # whether somebody makes them
        self.version = 0  # changes with every connection made
        self._warm: dict[Link, Lives] = {}
        self._strikes: dict[Link, Strikes] = {}

    def are_cold(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Whether two are to be left alone until their connection is made."""
        if not self.are_made or self.knows(prefill, decode):
            return False
        return now < max(prefill.up_since, decode.up_since) + PATIENCE_S

    def knows(self, prefill: Worker, decode: Worker) -> bool:
        """Whether nothing is left to be done for two."""
        return self._warm.get((prefill, decode)) == (prefill.up_since, decode.up_since)

    def warm(self, prefill: Worker, decode: Worker) -> None:
        """Note that a connection is made, or was tried often enough."""
        self._warm[prefill, decode] = prefill.up_since, decode.up_since
        self.version += 1

    def keep(self, workers: Collection[Worker]) -> None:
        """Forget all but these."""
        self._warm = {k: v for k, v in self._warm.items() if _are_of(k, workers)}
        self._strikes = {k: v for k, v in self._strikes.items() if _are_of(k, workers)}

    # Those that fail

    def failed(self, prefill: Worker, decode: Worker | None, now: float) -> bool:
        """Count a failure of a link, or of a prefill worker; True if it is barred from now on."""
        lives = _lives(prefill, decode)
        strikes = self._strikes.get((prefill, decode))
        if strikes is None or strikes.lives != lives:
            strikes = self._strikes[prefill, decode] = Strikes(lives)
        strikes.count += 1
        if strikes.count < STRIKES or now < strikes.until:
            return False
        strikes.until = now + BARRED_S
        return True

    def bar(self, prefill: Worker, decode: Worker, until: float) -> None:
        """Leave a link alone for longer: it is known not to work."""
        self._strikes[prefill, decode] = Strikes(_lives(prefill, decode), STRIKES, until)

    def worked(self, prefill: Worker, decode: Worker | None) -> None:
        """Note that a link, or a prefill worker, does what it is there for."""
        if self._strikes:
            self._strikes.pop((prefill, decode), None)

    @property
    def bars(self) -> bool:
        """Whether anything is barred, or nearly so."""
        return bool(self._strikes)

    def is_barred(self, prefill: Worker, decode: Worker | None, now: float) -> bool:
        """Whether a link, or with None a prefill worker, is left alone for now."""
        strikes = self._strikes.get((prefill, decode))
        if strikes is None or now >= strikes.until:
            return False
        return strikes.lives == _lives(prefill, decode)

    def barred(self, now: float) -> list[Link]:
        """List what is left alone for now."""
        return [link for link in self._strikes if self.is_barred(*link, now)]

    def note(self, worker: Worker, now: float) -> str:
        """Say of a prefill worker that it is left alone; empty if it is not."""
        if self.is_barred(worker, None, now):
            return "prefills nothing for now: it refuses, or its answers name nothing to fetch"
        decodes = [d.name for p, d in self.barred(now) if p is worker and d is not None]
        if not decodes:
            return ""
        return f"prefills nothing for {', '.join(decodes)} for now: transfers to there fail"


def _lives(prefill: Worker, decode: Worker | None) -> Lives:
    return prefill.up_since, 0.0 if decode is None else decode.up_since


def _are_of(link: Link, workers: Collection[Worker]) -> bool:
    return all(worker is None or worker in workers for worker in link)

"""Which prefill workers are connected to which decode workers, and which of them had better not be.

The first transfer between two workers takes a handshake, seconds perhaps, that no user should pay.
Somebody makes the connections (`health/warmup`) and says so here; from when either of two has come
up they are given no hand-over between them until that is done. Where it does not come about, that
is tried again now and then, and until it does prompts are served as if there were no such link.

A link whose transfers fail or come late, and a prefill worker whose answers name nothing to fetch,
make each prompt be prefilled twice; one that refuses what others then serve is idle, so it is given
the next too. After a few in a row they are left alone for a while; then the next one tells whether
that goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role

DECODE = Role.DECODE
STRIKES = 3  # in a row
BARRED_S = 60.0
Lives = tuple[float, float]  # since when each of two is up
Link = tuple[Worker, Worker | None]  # None: whichever decode worker


@dataclass(slots=True)
class LinkFailures:
    """What went wrong between two, in a row."""

    lives: Lives
    count: int = 0
    until: float = 0.0


class KvLinks:
    """The connections between workers."""

    def __init__(self) -> None:
        self.are_made = False  # whether somebody makes them
        self.version = 0  # changes with every connection made
        self._warm: dict[Link, Lives] = {}
        self._unmade: dict[tuple[Worker, Worker], Lives] = {}  # tried, and nothing came of it
        self._strikes: dict[Link, LinkFailures] = {}

    def are_cold(self, prefill: Worker, decode: Worker) -> bool:
        """Whether two are to be left alone until their connection is made."""
        return self.are_made and not self.knows(prefill, decode)

    def is_shut(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Whether nothing may be handed over between two for now."""
        if self.are_cold(prefill, decode):
            return True
        return self.bars and self.is_barred(prefill, decode, now)

    def reaches(self, prefill: Worker, workers: Iterable[Worker], now: float) -> bool:
        """Whether there is a decode worker among these that something may be handed over to."""
        if not (self.are_made or self.bars):
            return True
        return any(w.role is DECODE and not self.is_shut(prefill, w, now) for w in workers)

    def knows(self, prefill: Worker, decode: Worker) -> bool:
        """Whether nothing is left to be done for two."""
        return self._warm.get((prefill, decode)) == (prefill.up_since, decode.up_since)

    def warm(self, prefill: Worker, decode: Worker) -> None:
        """Note that a connection is made, or that only users can make it."""
        self._warm[prefill, decode] = prefill.up_since, decode.up_since
        self._unmade.pop((prefill, decode), None)
        self.version += 1

    def unmade(self, prefill: Worker, decode: Worker) -> None:
        """Note that a connection did not come about."""
        self._unmade[prefill, decode] = prefill.up_since, decode.up_since

    def keep(self, workers: Collection[Worker]) -> None:
        """Forget all but these."""
        self._warm = {k: v for k, v in self._warm.items() if _are_of(k, workers)}
        self._unmade = {k: v for k, v in self._unmade.items() if _are_of(k, workers)}
        self._strikes = {k: v for k, v in self._strikes.items() if _are_of(k, workers)}

    # Those that fail

    def failed(self, prefill: Worker, decode: Worker | None, now: float) -> bool:
        """Count a failure of a link, or of a prefill worker; True if it is barred from now on."""
        lives = _lives(prefill, decode)
        strikes = self._strikes.get((prefill, decode))
        if strikes is None or strikes.lives != lives:
            strikes = self._strikes[prefill, decode] = LinkFailures(lives)
        strikes.count += 1
        if strikes.count < STRIKES or now < strikes.until:
            return False
        strikes.until = now + BARRED_S
        return True

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
        if unmade := [d.name for p, d in self._unmade if p is worker and self._is_unmade(p, d)]:
            return f"prefills nothing for {', '.join(unmade)} yet: no first transfer came about"
        decodes = [d.name for p, d in self.barred(now) if p is worker and d is not None]
        if not decodes:
            return ""
        return f"prefills nothing for {', '.join(decodes)} for now: transfers to there fail"

    def _is_unmade(self, prefill: Worker, decode: Worker) -> bool:
        return self._unmade.get((prefill, decode)) == (prefill.up_since, decode.up_since)


def _lives(prefill: Worker, decode: Worker | None) -> Lives:
    return prefill.up_since, 0.0 if decode is None else decode.up_since


def _are_of(link: Link, workers: Collection[Worker]) -> bool:
    return all(worker is None or worker in workers for worker in link)

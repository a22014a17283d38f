"""KV connections between prefill and decode workers, and barred links.

The first transfer of a link needs a handshake that may take seconds. `health/warmup` makes it in
advance; until then the link gets no hand-overs.

A failing link makes each prompt run twice. After `FAILURES_TO_BAR` failures in a row, a link or a
prefill worker is barred for `BARRED_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role

DECODE = Role.DECODE
FAILURES_TO_BAR = 3
BARRED_S = 60.0
Lives = tuple[float, float]  # `up_since` of the two workers
Link = tuple[Worker, Worker | None]
ANY_DECODE: Worker | None = None  # in a link that stands for the prefill worker itself


@dataclass(slots=True)
class LinkFailures:
    lives: Lives
    count: int = 0
    until: float = 0.0


def start_times(prefill: Worker, decode: Worker | None) -> Lives:
    return prefill.up_since, 0.0 if decode is None else decode.up_since


class KvLinks:
    def __init__(self) -> None:
        self.are_made = False  # connections are made in advance
        self.version = 0  # grows with every connection
        self._warm: dict[Link, Lives] = {}
        self._failed: dict[tuple[Worker, Worker], Lives] = {}
        self._strikes: dict[Link, LinkFailures] = {}

    def is_cold(self, prefill: Worker, decode: Worker) -> bool:
        """Return whether the link still waits for its connection."""
        return self.are_made and not self.is_warm(prefill, decode)

    def is_unusable(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Return whether hand-overs are not allowed."""
        if self.is_cold(prefill, decode):
            return True
        return self.has_failures and self.is_barred(prefill, decode, now)

    def can_reach(self, prefill: Worker, workers: Iterable[Worker], now: float) -> bool:
        """Return whether a prefill worker may hand over to any of these workers."""
        if not (self.are_made or self.has_failures):
            return True
        return any(w.role is DECODE and not self.is_unusable(prefill, w, now) for w in workers)

    def is_warm(self, prefill: Worker, decode: Worker) -> bool:
        """Return whether the connection needs no more work."""
        return self._warm.get((prefill, decode)) == start_times(prefill, decode)

    def set_warm(self, prefill: Worker, decode: Worker) -> None:
        """Note a connection, or one that only requests can make."""
        self._warm[prefill, decode] = start_times(prefill, decode)
        self._failed.pop((prefill, decode), None)
        self.version += 1

    def set_unmade(self, prefill: Worker, decode: Worker) -> None:
        self._failed[prefill, decode] = start_times(prefill, decode)

    def keep_only(self, workers: Collection[Worker]) -> None:
        self._warm = {k: v for k, v in self._warm.items() if _are_of(k, workers)}
        self._failed = {k: v for k, v in self._failed.items() if _are_of(k, workers)}
        self._strikes = {k: v for k, v in self._strikes.items() if _are_of(k, workers)}

    # Links that fail

    def record_failure(self, prefill: Worker, decode: Worker | None, now: float) -> bool:
        """Count a failure of a link or prefill worker; True if it becomes barred."""
        lives = start_times(prefill, decode)
        strikes = self._strikes.get((prefill, decode))
        if strikes is None or strikes.lives != lives:
            strikes = self._strikes[prefill, decode] = LinkFailures(lives)
        strikes.count += 1
        if strikes.count < FAILURES_TO_BAR or now < strikes.until:
            return False
        strikes.until = now + BARRED_S
        return True

    def record_success(self, prefill: Worker, decode: Worker | None) -> None:
        if self._strikes:
            self._strikes.pop((prefill, decode), None)

    @property
    def has_failures(self) -> bool:
        return bool(self._strikes)

    def is_barred(self, prefill: Worker, decode: Worker | None, now: float) -> bool:
        strikes = self._strikes.get((prefill, decode))
        if strikes is None or now >= strikes.until:
            return False
        return strikes.lives == start_times(prefill, decode)

    def barred_links(self, now: float) -> list[Link]:
        return [link for link in self._strikes if self.is_barred(*link, now)]

    def describe(self, worker: Worker, now: float) -> str:
        """Return why a prefill worker does not prefill; empty if it does."""
        if self.is_barred(worker, ANY_DECODE, now):
            return (
                "prefills nothing for now: it refuses, or its responses name no KV blocks to fetch"
            )
        if unmade := [
            decode.name
            for (prefill, decode), lives in self._failed.items()
            if prefill is worker and lives == start_times(prefill, decode)
        ]:
            return f"prefills nothing for {', '.join(unmade)} yet: the first transfer failed"
        decodes = [d.name for p, d in self.barred_links(now) if p is worker and d is not None]
        if not decodes:
            return ""
        return f"prefills nothing for {', '.join(decodes)} for now: its transfers fail"


def _are_of(link: Link, workers: Collection[Worker]) -> bool:
    return all(worker is None or worker in workers for worker in link)

"""Which prefill workers are connected to which decode workers.

The first transfer between two workers takes a handshake, seconds perhaps, that no user should pay.
Somebody makes the connections (`control/warmup`) and says so here; for a while after either of two
has come up they are given no hand-over between them until that is done.
"""

from __future__ import annotations

from proxy.core.worker import Worker

PATIENCE_S = 10.0
Link = tuple[Worker, float, Worker, float]


class Links:
    """The connections between workers."""

    def __init__(self) -> None:
        self.are_made = False  # whether somebody makes them
        self._warm: set[Link] = set()

    def are_cold(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Whether two are to be left alone until their connection is made."""
        if not self.are_made or (prefill, prefill.up_since, decode, decode.up_since) in self._warm:
            return False
        return now < max(prefill.up_since, decode.up_since) + PATIENCE_S

    def knows(self, prefill: Worker, decode: Worker) -> bool:
        """Whether nothing is left to be done for two."""
        return (prefill, prefill.up_since, decode, decode.up_since) in self._warm

    def warm(self, prefill: Worker, decode: Worker) -> None:
        """Note that a connection is made, or was tried often enough."""
        lives = {
            (one, since, other, until)
            for one, since, other, until in self._warm
            if one.up_since == since and other.up_since == until
        }
        self._warm = lives | {(prefill, prefill.up_since, decode, decode.up_since)}

"""The last requests and where they went, for somebody who asks why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from proxy.core.fleet.leases import Decision
from proxy.core.model.types import Reason, RequestInfo

# A minute at 6,000 requests a minute, which is what the status page begins with; some 6 MB.
KEPT = 6000
# Clients choose ids and models: thousands of huge ones must not be kept.
MAX_TEXT = 200


@dataclass(slots=True)
class RecentRequest:
    """One request that was answered."""

    id: str
    time: float  # when it was answered, seconds since 1970
    model: str
    route: str
    worker: str | None  # None: refused
    reason: Reason
    status: int
    body_bytes: int
    prompt_tokens: int
    counted: bool  # whether a worker counted them; else an estimate
    output_tokens: int | None  # the most it was allowed
    predicted_ttft_s: float | None  # counted from when it was placed
    ttft_s: float | None  # counted from its arrival
    queue_s: float
    duration_s: float
    prefill_worker: str | None = None  # of a hand-over; `worker` is the one that decodes
    prefill_s: float | None = None  # predicted, as is the next
    transfer_s: float | None = None
    transferred_s: float | None = None  # as it was seen, where the answer is a stream
    size: str = ""  # its class, as metrics have it
    tenant: str | None = None
    handover: str | None = None  # whether it was handed over, or why not


# Its values in their order: to make an `RecentRequest` costs more, and hardly one is ever read.
Row = tuple[
    str, float, str, str, str | None, Reason, int, int, int, bool, int | None,
    float | None, float | None, float, float, str | None, float | None, float | None, float | None,
    str, str | None, str | None,
]  # fmt: skip

Halves = tuple[str | None, float | None, float | None, float | None]
NO_HALVES: Halves = (None, None, None, None)


class RecentRequests:
    """A ring of them; the newest push out the oldest."""

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.time) -> None:
        self._rows: deque[Row] = deque(maxlen=kept)
        self._clock = clock

    def __len__(self) -> int:
        """Count what is kept."""
        return len(self._rows)

    def add(
        self,
        ask: RequestInfo,
        size: str,
        decision: Decision | None,
        reason: Reason,
        status: int,
        ttft_s: float | None,
        duration_s: float,
        queue_s: float,
    ) -> None:
        """Keep an answered request; one that was refused has no decision."""
        worker = predicted_s = whether = None
        halves = NO_HALVES
        if decision is not None:
            worker, predicted_s = decision.worker.name, decision.predicted_ttft_s
            whether = decision.whether or None
            if (handover := decision.handover) is not None:
                halves = (
                    handover.prefill.name, handover.prefill_s, handover.transfer_s,
                    handover.transferred_s,
                )  # fmt: skip
        self._rows.append(
            (
                ask.id[:MAX_TEXT], self._clock(), ask.model[:MAX_TEXT], ask.route, worker, reason,
                status, ask.body_bytes, ask.prompt_tokens, ask.counted, ask.output_tokens,
                predicted_s, ttft_s, queue_s, duration_s, *halves, size,
                None if ask.tenant is None else ask.tenant.name, whether,
            )
        )  # fmt: skip

    def newest(
        self,
        limit: int,
        *,
        model: str | None = None,
        worker: str | None = None,
        reason: Reason | None = None,
        status: int | None = None,
    ) -> Iterator[RecentRequest]:
        """Yield up to `limit` entries that match, newest first."""
        for row in reversed(self._rows):
            if limit <= 0:
                return
            entry = RecentRequest(*row)
            if model is not None and entry.model != model:
                continue
            if worker is not None and entry.worker != worker:
                continue
            if reason is not None and entry.reason is not reason:
                continue
            if status is not None and entry.status != status:
                continue
            limit -= 1
            yield entry

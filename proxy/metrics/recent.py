"""The last requests and where they were sent, for troubleshooting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from proxy.core.fleet.leases import Decision
from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.types import Reason, RequestInfo

# One minute at 100 requests per second; about 6 MB.
MAX_ENTRIES = 6000
# Clients choose ids and model names; long ones are cut to bound the memory.
MAX_TEXT = 200


def text(value: str, max_chars: int = MAX_TEXT) -> str:
    """Shorten a client's text, and replace invalid characters."""
    return value[:max_chars].encode(errors="replace").decode()


@dataclass(slots=True)
class RecentRequest:
    id: str
    time: float  # end of the response, seconds since 1970
    model: str
    route: str
    worker: str | None  # None if refused
    reason: Reason
    status: int
    body_bytes: int
    prompt_tokens: int
    counted: bool  # by a worker; else an estimate
    output_tokens: int | None  # the request's output limit
    predicted_ttft_s: float | None  # from the placement
    ttft_s: float | None  # from the arrival
    queue_s: float
    duration_s: float
    prefill_worker: str | None = None  # set for a hand-over
    prefill_s: float | None = None  # predicted, like the next
    transfer_s: float | None = None
    transferred_s: float | None = None  # observed, of a stream
    size: str = ""  # its class label
    tenant: str | None = None
    handover: str | None = None  # the hand-over verdict
    cached_tokens: int = 0  # expected where the prompt was prefilled
    cached_reported: bool = False  # by that worker's journal; otherwise estimated
    left_workers: tuple[str, ...] = ()  # from which the stream went on, in this order
    session: str | None = None  # its key
    turn: str | None = None  # placement of its turn
    target_ttft_s: float | None = None  # by the client's deadline, or the operator's target


class RequestFilter(NamedTuple):
    """The values that an entry must have; None allows any."""

    model: str | None = None
    worker: str | None = None
    reason: Reason | None = None
    status: int | None = None

    def matches(self, entry: RecentRequest) -> bool:
        return (
            self.model in (None, entry.model)
            and self.worker in (None, entry.worker)
            and self.reason in (None, entry.reason)
            and self.status in (None, entry.status)
        )


ANY = RequestFilter()

# A RecentRequest's fields in order: a tuple is cheaper to create.
Row = tuple[
    str, float, str, str, str | None, Reason, int, int, int, bool, int | None,
    float | None, float | None, float, float, str | None, float | None, float | None, float | None,
    str, str | None, str | None, int, bool, tuple[str, ...], str | None, str | None, float | None,
]  # fmt: skip

HandoverFields = tuple[str | None, float | None, float | None, float | None]
NO_HANDOVER: HandoverFields = (None, None, None, None)


class RecentRequests:
    def __init__(
        self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.time
    ) -> None:
        self._rows: deque[Row] = deque(maxlen=max_entries)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, info: RequestInfo, decision: Decision | None, finished: FinishedRequest) -> None:
        worker = predicted_s = verdict = turn = None
        legs = NO_HANDOVER
        cached, reported = 0, False
        if decision is not None:
            worker, predicted_s = decision.worker.name, decision.predicted_ttft_s
            verdict, turn = decision.verdict or None, decision.turn or None
            cached, reported = decision.cached_tokens, decision.worker.reports_prefixes
            if (handover := decision.handover) is not None:
                cached, reported = handover.cached_tokens, handover.prefill.reports_prefixes
                legs = (
                    handover.prefill.name, handover.prefill_s, handover.transfer_s,
                    handover.transferred_s,
                )  # fmt: skip
        self._rows.append(
            (
                info.id[:MAX_TEXT], self._clock(), info.model[:MAX_TEXT], info.route, worker,
                finished.reason, finished.status, info.body_bytes, info.prompt_tokens, info.counted,
                info.output_tokens, predicted_s, finished.ttft_s, finished.queue_s,
                finished.duration_s, *legs, finished.size,
                None if info.tenant is None else info.tenant.name, verdict,
                cached, reported, finished.left_workers,
                f"{info.session:016x}" if info.session else None, turn, finished.target_s,
            )
        )  # fmt: skip

    def newest(self, limit: int, wanted: RequestFilter = ANY) -> Iterator[RecentRequest]:
        """Yield up to `limit` matching entries, newest first."""
        entries = (RecentRequest(*row) for row in reversed(self._rows))
        return islice(filter(wanted.matches, entries), limit)

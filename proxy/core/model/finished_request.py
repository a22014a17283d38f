"""The record of a finished request."""

from __future__ import annotations

from proxy.core.model.types import NONE, Reason


class FinishedRequest:
    """Labels and times of one request."""

    def __init__(self, route: str, status: int, reason: Reason, duration_s: float) -> None:
        self.route = route
        self.status = status
        self.reason = reason
        self.duration_s = duration_s
        self.queue_s = 0.0
        self.model = ""
        self.worker = NONE  # if refused, like `pool`
        self.pool: str = NONE  # the worker's role
        self.size = NONE  # class label; `none` if unparsed
        self.stream: bool | None = None  # None if nothing was generated
        self.ttft_s: float | None = None  # from the arrival, like the prediction
        self.target_s: float | None = None  # for the first token, from the arrival
        self.predicted_ttft_s: float | None = None
        self.tpot_s: float | None = None  # mean time between tokens, of two or more
        self.left_workers: tuple[str, ...] = ()  # from which a stream went on elsewhere
        self.leg: tuple[str, str] | None = None  # current worker and pool, if not `worker`
        self.placed_s: float | None = None  # from the arrival to the last placement
        self.leg_s: float | None = None  # of the prefill leg
        self.fetched = False  # the decode worker had blocks to fetch

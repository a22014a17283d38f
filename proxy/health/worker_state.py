"""The state of a worker, as the admin API and the status page show it."""

from __future__ import annotations

from typing import Literal

from proxy.core.fleet.worker import Worker
from proxy.health.breaker_log import describe_breaker

State = Literal["starting", "up", "down", "wrong_model", "resting", "draining", "drained"]


def state(worker: Worker) -> State:
    """Return a worker's state; if several apply, the most lasting."""
    if worker.draining:
        return "draining" if worker.requests or worker.unfetched_handovers else "drained"
    if not worker.up:
        return "down" if worker.probed else "starting"
    if worker.lacks_model:
        return "wrong_model"
    return "up" if worker.breaker.closed else "resting"


def why_not(worker: Worker, now: float) -> str:
    """Return why a worker gets no requests, in addition to its state."""
    return (
        describe_breaker(worker, now) if state(worker) == "resting" else worker.not_served_because
    )

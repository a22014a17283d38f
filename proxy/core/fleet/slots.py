"""How much work a worker takes before some of it waits in its own queue, as its page shows.

The router counts what it charges to a worker's KV cache. How many sequences an engine runs at once
it knows where the fleet file says it, who else asks it and that its scheduler holds requests back
it does not. But a queue shows all of that. For a hand-over it is the wrong place to wait in: the
prefill worker keeps the blocks meanwhile, and not for ever. For a whole request it is as good as
the router's, where it would wait behind hand-overs.

A hand-over needs its seat when the prefill is done. So what counts is not whether one is free now,
but whether one should be by then.

Idea: while requests wait there, on two pages in a row, it had room for as many fewer as wait; with
each page on which none do, for a quarter and one more, so that what was learnt of a bad moment is
soon forgotten. A page is old news: who counts what was charged since does not send, at the first
one without a queue, all that waits for it.

Cost: a few additions per page. How it fails: a burst that comes within two pages is not held back;
a page that is missing, or too old, holds nothing back.
"""

from __future__ import annotations

from math import inf

from proxy.core.fleet.kv_usage import KV_FULL
from proxy.core.fleet.worker import Worker
from proxy.core.model.specs import Gauges

MORE, ONE_MORE = 1.25, 1.0
HEEDED_S = 10.0  # after which a page says nothing of now
# Among a page's further figures: of those that wait, how many do so for the engine to have room.
# Without it, who is being transferred is among them.
QUEUED = "queued"


def learn(worker: Worker, gauges: Gauges) -> None:
    """Take what a page says of a worker's own queue; after strangers are known."""
    queued = int(gauges.extra.get(QUEUED, gauges.waiting))
    worker.queued = min(queued, worker.queued_before)
    worker.queued_before = queued
    if worker.queued:
        taken = worker.requests + worker.strangers
        worker.seats = float(max(taken - worker.queued, gauges.running, 1))
    else:
        worker.seats = MORE * worker.seats + ONE_MORE


def forget(worker: Worker) -> None:
    """Forget a queue that no page tells of any more."""
    worker.queued = worker.queued_before = 0
    worker.seats = inf


def wait_s(worker: Worker, now: float) -> float:
    """Reckon how long until a worker has a seat for one more; inf where nothing tells.

    Each that decodes there goes when its answer is written, as far as that was foreseen.
    """
    taken, seats = _taken(worker, now)
    if taken < seats or not taken:
        return 0.0
    decoding = worker.decoding
    if not decoding or not worker.requests:
        return inf
    left = worker.decode_tokens / worker.requests
    return (taken + 1.0 - seats) * left * worker.pace.step_s(decoding) / decoding


def share_taken(worker: Worker, now: float) -> float:
    """Say what part of a worker's seats is taken; 0 where nothing tells how many it has.

    By those who are there: a seat for who is prefilled elsewhere is promised, and still free.
    """
    here, gauges = worker.sequences, worker.gauges
    if gauges is not None and now - gauges.at <= HEEDED_S:
        here += worker.strangers
        if here and (worker.queued or gauges.kv_usage > KV_FULL):
            return 1.0  # nobody finds one
    return min(here / _taken(worker, now)[1], 1.0) if here else 0.0


def are_taken(worker: Worker, now: float, within_s: float = 0.0) -> bool:
    """Whether what comes to a worker in so many seconds would wait there, as far as is known."""
    return wait_s(worker, now) > within_s


def _taken(worker: Worker, now: float) -> tuple[int, float]:
    """Count who has a seat, or is to have one, and the seats; inf where nothing tells."""
    gauges = worker.gauges
    seats = inf if worker.spec.seats is None else float(worker.spec.seats)
    if gauges is None or now - gauges.at > HEEDED_S:
        return worker.requests, seats
    taken = worker.requests + worker.strangers
    seats = min(seats, worker.seats)
    return taken, min(seats, taken) if gauges.kv_usage > KV_FULL else seats

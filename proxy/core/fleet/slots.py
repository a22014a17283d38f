"""Slots of a worker, learned from its own queue.

A hand-over must not wait in that queue, because the prefill worker holds its blocks for a limited
time. It needs a slot when its prefill is done.

Idea: with a queue on two pages, the slots are the taken ones less the waiting. Each page without a
queue adds a quarter plus one.

How it fails: a burst within two pages is not held back. An old page holds nothing back.
"""

from __future__ import annotations

from math import inf

from proxy.core.fleet.kv_usage import KV_FULL
from proxy.core.fleet.worker import Worker
from proxy.core.model.specs import Gauges

SLOT_GROWTH_FACTOR, SLOT_GROWTH = 1.25, 1.0
MAX_PAGE_AGE_S = 10.0
# Requests waiting for room; `waiting` includes transfers.
QUEUED_GAUGE = "queued"


def learn_from_page(worker: Worker, gauges: Gauges) -> None:
    """Learn from a page, after `foreign_requests`."""
    queued = int(gauges.extra.get(QUEUED_GAUGE, gauges.waiting))
    worker.queued = min(queued, worker.queued_before)
    worker.queued_before = queued
    if worker.queued:
        taken = worker.requests + worker.foreign_requests
        worker.learned_slots = float(max(taken - worker.queued, gauges.running, 1))
    else:
        worker.learned_slots = SLOT_GROWTH_FACTOR * worker.learned_slots + SLOT_GROWTH


def forget(worker: Worker) -> None:
    worker.queued = worker.queued_before = 0
    worker.learned_slots = inf


def wait_s(worker: Worker, now: float) -> float:
    """Estimate the time to a free slot; inf if unknown."""
    taken, slots = _count_used(worker, now)
    if taken < slots or not taken:
        return 0.0
    decoding = worker.num_decoding
    if not decoding or not worker.requests:
        return inf
    left = worker.decode_tokens / worker.requests
    return (taken + 1.0 - slots) * left * worker.pace.step_s(decoding) / decoding


def next_slot_s(worker: Worker, ahead: int) -> float:
    """Estimate the time to a slot of a full worker; inf if unknown."""
    requests = worker.requests
    if not requests:
        return inf
    left = worker.decode_tokens / requests
    more = ahead + 1 + max(requests - worker.request_limit, 0)
    return more * left * worker.pace.step_s(requests) / requests


def share_taken(worker: Worker, now: float) -> float:
    """Return the share of slots in use; 0 if unknown.

    Requests in prefill elsewhere do not count.
    """
    taken, gauges = worker.sequences, worker.gauges
    if gauges is not None and now - gauges.at <= MAX_PAGE_AGE_S:
        taken += worker.foreign_requests
        if taken and (worker.queued or gauges.kv_usage > KV_FULL):
            return 1.0
    return min(taken / _count_used(worker, now)[1], 1.0) if taken else 0.0


def must_wait(worker: Worker, now: float, within_s: float = 0.0) -> bool:
    return wait_s(worker, now) > within_s


def _count_used(worker: Worker, now: float) -> tuple[int, float]:
    gauges = worker.gauges
    slots = inf if worker.spec.slots is None else float(worker.spec.slots)
    if gauges is None or now - gauges.at > MAX_PAGE_AGE_S:
        return worker.requests, slots
    taken = worker.requests + worker.foreign_requests
    slots = min(slots, worker.learned_slots)
    return taken, min(slots, taken) if gauges.kv_usage > KV_FULL else slots

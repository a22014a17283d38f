"""The states of an exchange, and the transitions between them.

    reading -> limiting -> counting -> queued -> prefilling -> sent -> answering -> done
                                         ^           |          |
                                         +-----------+----------+  retry on another worker

A stream that another worker continues goes from `answering` back to `sent` or `queued`. Every state
may lead to `done`. Most requests go from `reading` directly to `sent`.
"""

from __future__ import annotations

from enum import Enum


class ExchangeState(Enum):
    READING = "reading"
    LIMITING = "limiting"  # all hosts together decide its tenant's limits
    COUNTING = "counting"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    SENT = "sent"  # to a worker; no response yet
    ANSWERING = "answering"  # the client has part of the response
    DONE = "done"


# By these names: Python 3.11 looks up a member of an enum in Python code.
READING, LIMITING = ExchangeState.READING, ExchangeState.LIMITING
COUNTING, QUEUED = ExchangeState.COUNTING, ExchangeState.QUEUED
PREFILLING, SENT = ExchangeState.PREFILLING, ExchangeState.SENT
ANSWERING, DONE = ExchangeState.ANSWERING, ExchangeState.DONE
# String keys hash faster than enum members.
NEXT: dict[str, tuple[ExchangeState, ...]] = {
    "reading": (SENT, LIMITING, COUNTING, QUEUED, PREFILLING, DONE),
    "limiting": (SENT, COUNTING, QUEUED, PREFILLING, DONE),
    "counting": (SENT, QUEUED, PREFILLING, DONE),
    "queued": (SENT, PREFILLING, DONE),
    # A retry goes back to a worker or to the queue.
    "prefilling": (SENT, PREFILLING, QUEUED, ANSWERING, DONE),
    "sent": (ANSWERING, DONE, SENT, PREFILLING, QUEUED),
    "answering": (DONE, SENT, QUEUED),
    "done": (),
}


def may_follow(before: ExchangeState, after: ExchangeState) -> bool:
    return after in NEXT[before._value_]  # `value` is a slow property

"""The states of an exchange, and the transitions between them.

    reading -> counting -> queued -> prefilling -> sent -> answering -> done
                             ^           |          |
                             +-----------+----------+  retry on another worker

Every state may lead to `done`. Most requests go from `reading` directly to `sent`.
"""

from __future__ import annotations

from enum import Enum


class ExchangeState(Enum):
    """The phase of a request."""

    READING = "reading"
    COUNTING = "counting"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    SENT = "sent"  # to a worker; no response yet
    ANSWERING = "answering"  # the client has part of the response
    DONE = "done"


_READING, _COUNTING, _QUEUED = ExchangeState.READING, ExchangeState.COUNTING, ExchangeState.QUEUED
_PREFILLING, _SENT = ExchangeState.PREFILLING, ExchangeState.SENT
_ANSWERING, _DONE = ExchangeState.ANSWERING, ExchangeState.DONE
# String keys hash faster than enum members.
NEXT: dict[str, tuple[ExchangeState, ...]] = {
    "reading": (_SENT, _COUNTING, _QUEUED, _PREFILLING, _DONE),
    "counting": (_SENT, _QUEUED, _PREFILLING, _DONE),
    "queued": (_SENT, _PREFILLING, _DONE),
    # A retry goes back to a worker or to the queue.
    "prefilling": (_SENT, _PREFILLING, _QUEUED, _ANSWERING, _DONE),
    "sent": (_ANSWERING, _DONE, _SENT, _PREFILLING, _QUEUED),
    "answering": (_DONE,),
    "done": (),
}


def may_follow(before: ExchangeState, after: ExchangeState) -> bool:
    """Return True if there is a transition from one state to the other."""
    return after in NEXT[before._value_]  # `value` is a slow property

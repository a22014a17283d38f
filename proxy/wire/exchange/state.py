"""The states of an exchange, and the transitions between them.

    reading -> counting -> queued -> prefilling -> sent -> answering -> done
                             ^           |          |
                             +-----------+----------+  another worker, until the client
                                                       has a byte of the response

Each state but the last may lead to `done`. A state may be passed over: most requests go from
`reading` to `sent` at once.
"""

from __future__ import annotations

from enum import Enum


class ExchangeState(Enum):
    """The phase that a request is in."""

    READING = "reading"  # the body is read and its size estimated
    COUNTING = "counting"  # a worker counts its tokens
    QUEUED = "queued"  # no worker has room
    PREFILLING = "prefilling"  # a prefill worker computes its prompt
    SENT = "sent"  # a worker has it, and the client no byte of the response
    ANSWERING = "answering"  # the client has a part of the response
    DONE = "done"

    def follows(self, before: ExchangeState) -> bool:
        """Return True if this state may come after another."""
        return self in NEXT[before.value]


_READING, _COUNTING, _QUEUED = ExchangeState.READING, ExchangeState.COUNTING, ExchangeState.QUEUED
_PREFILLING, _SENT = ExchangeState.PREFILLING, ExchangeState.SENT
_ANSWERING, _DONE = ExchangeState.ANSWERING, ExchangeState.DONE
# By the name of a state, because strings have a fast hash. Tuples are searched by identity.
NEXT: dict[str, tuple[ExchangeState, ...]] = {
    "reading": (_SENT, _COUNTING, _QUEUED, _PREFILLING, _DONE),
    "counting": (_SENT, _QUEUED, _PREFILLING, _DONE),
    "queued": (_SENT, _PREFILLING, _DONE),
    # A retry goes back: to another prefill worker, to a worker that does all of it, to the queue.
    "prefilling": (_SENT, _PREFILLING, _QUEUED, _ANSWERING, _DONE),
    "sent": (_ANSWERING, _DONE, _SENT, _PREFILLING, _QUEUED),
    "answering": (_DONE,),
    "done": (),
}

"""A log line for each stream that went on from another worker, or could not.

A worker with thousands of streams may fail: most lines beyond `MAX_LINES` are left out.
"""

from __future__ import annotations

import logging
from math import inf

from proxy.wire.exchange.request_record import RequestRecord

logger = logging.getLogger(__name__)

MAX_LINES, INTERVAL_S = 100, 10.0
MAX_NAME_CHARS = 100  # clients choose ids


class ContinuationLog:
    """The log of one process."""

    def __init__(self) -> None:
        self._since = -inf
        self._lines = 0
        self._left_out = 0

    def log_continued(
        self, now: float, record: RequestRecord, before: str, after: str, *, by_text: bool
    ) -> None:
        if self._may_log(now):
            how = ", from its text" if by_text else ""
            logger.info(
                "%s: the stream of worker %s continues on %s%s", _name(record), before, after, how
            )

    def log_lost(self, now: float, record: RequestRecord, worker: str, why: str) -> None:
        if self._may_log(now):
            logger.warning(
                "%s: the stream of worker %s is not continued: %s", _name(record), worker, why
            )

    def _may_log(self, now: float) -> bool:
        if now - self._since >= INTERVAL_S:
            if self._left_out:
                logger.warning("%d lines on other streams are left out", self._left_out)
            self._since, self._lines, self._left_out = now, 0, 0
        self._lines += 1
        self._left_out += self._lines > MAX_LINES
        return self._lines <= MAX_LINES


def _name(record: RequestRecord) -> str:
    name, trace = f"request {record.id[:MAX_NAME_CHARS]}", record.trace_id
    return f"{name}, trace {trace}" if trace else name

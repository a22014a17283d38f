"""Token counts requested from a worker."""

from __future__ import annotations

from typing import Any, cast

import pytest

from proxy.http.response_parser import ResponseHead
from proxy.wire.exchange import tokenize as module
from proxy.wire.exchange.tokenize import TokenizeRequest
from proxy.wire.worker.connection import WorkerConnection, WorkerError

pytestmark = pytest.mark.plain("a class of its own instead of a connection")


class Connection:
    """A connection that records its drop."""

    dropped = False

    def drop(self) -> None:
        self.dropped = True


class CountRequest:
    """A request for a count, and its result."""

    def __init__(self, status: int = 200) -> None:
        self.found: list[tuple[float, int | None]] = []
        self.count = TokenizeRequest(9.0, lambda now, count: self.found.append((now, count)))
        self.connection = Connection()
        self.count.connection = cast("WorkerConnection", self.connection)
        head: Any = ResponseHead()
        head.status = status
        self.count.begun(1.0, head)


@pytest.mark.parametrize(
    ("status", "answer", "count"),
    [
        (200, b'{"count": 5, "tokens": [1]}', 5),
        (200, b'{"count": 0}', 0),
        (200, b'{"count": -1}', None),
        (200, b'{"count": "5"}', None),
        (200, b'{"count": 5', None),
        (200, b'{"max_model_len": 5}', None),
        (200, b"[5]", None),
        (201, b'{"count": 5}', None),
        (500, b'{"count": 5}', None),
    ],
)
def test_count_is_read_from_two_pieces(status: int, answer: bytes, count: int | None) -> None:
    request = CountRequest(status)
    request.count.received(2.0, answer[:4], ended=False)
    assert request.found == []
    request.count.received(3.0, answer[4:], ended=True)
    assert request.found == [(3.0, count)]
    assert request.count.connection is None
    assert not request.connection.dropped


def test_oversized_response_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSE_BYTES", 10)
    request = CountRequest()
    request.count.received(2.0, b"x" * 10, ended=False)
    assert request.found == []
    request.count.received(3.0, b"x", ended=False)
    assert request.found == [(3.0, None)]
    assert request.connection.dropped


def test_late_lost_and_dropped_requests_return_no_count() -> None:
    late, lost, dropped = CountRequest(), CountRequest(), CountRequest()
    assert late.count.extra_wait_s(9.0) == 0.0
    late.count.expire(9.0)
    lost.count.lost(4.0, WorkerError.RESET)
    dropped.count.drop()
    assert (late.found, lost.found, dropped.found) == ([(9.0, None)], [(4.0, None)], [])
    assert [request.connection.dropped for request in (late, lost, dropped)] == [True, False, True]
    assert lost.count.connection is None
    lost.count.drop()
    assert not lost.connection.dropped

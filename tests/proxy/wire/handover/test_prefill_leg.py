"""The first leg of a hand-over and the calls to its owner."""

from __future__ import annotations

from math import inf
from typing import cast

import pytest

from proxy.http.response_parser import ResponseHead
from proxy.wire.handover import prefill_leg as module
from proxy.wire.handover.prefill_leg import PrefillLeg
from proxy.wire.worker.connection import WorkerConnection, WorkerError

pytestmark = pytest.mark.plain("classes of its own instead of connections")


class Owner:
    """An owner that records its calls."""

    def __init__(self) -> None:
        self.connection: WorkerConnection | None = None
        self.calls: list[object] = []

    def prefill_ended(self, now: float, answer: bytes) -> None:
        self.calls.append((now, answer))

    def response_begun(self, now: float, head: ResponseHead) -> None:
        self.calls.append((now, head.status))

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        self.calls.append((now, body, ended))

    def connection_failed(self, now: float, trouble: WorkerError) -> None:
        self.calls.append((now, trouble))


class Connection:
    """A connection that records its drop."""

    dropped = False
    deadline = inf

    def drop(self) -> None:
        self.dropped = True


def leg_of(owner: Owner) -> tuple[PrefillLeg, Connection]:
    leg, connection = PrefillLeg(owner, 60.0), Connection()
    leg.connection = cast("WorkerConnection", connection)
    return leg, connection


def head(status: int) -> ResponseHead:
    head = ResponseHead()
    head.status = status
    return head


def test_successful_response_is_collected() -> None:
    owner = Owner()
    leg, _ = leg_of(owner)
    assert not leg.is_answering
    leg.response_begun(1.0, head(200))
    assert leg.is_answering
    leg.body_received(1.1, b"ab", ended=False)
    assert owner.calls == []
    leg.body_received(1.2, b"c", ended=True)
    assert owner.calls == [(1.2, b"abc")]
    assert leg.connection is None


@pytest.mark.parametrize("status", [400, 404, 429, 500, 204])
def test_other_responses_are_passed_to_the_owner(status: int) -> None:
    owner = Owner()
    leg, connection = leg_of(owner)
    leg.response_begun(1.0, head(status))
    leg.body_received(1.1, b"no", ended=True)
    assert owner.calls == [(1.0, status), (1.1, b"no", True)]
    assert owner.connection is connection


def test_loss_is_passed_to_the_owner() -> None:
    owner = Owner()
    leg, _ = leg_of(owner)
    leg.connection_failed(2.0, WorkerError.RESET)
    assert owner.calls == [(2.0, WorkerError.RESET)]
    assert leg.connection is None


def test_oversized_response_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSE_BYTES", 10)
    owner = Owner()
    leg, connection = leg_of(owner)
    leg.response_begun(1.0, head(200))
    leg.body_received(1.1, b"x" * 11, ended=False)
    assert owner.calls == [(1.1, WorkerError.BROKEN)]
    assert connection.dropped


def test_deadline_of_the_body_is_fixed_at_its_head() -> None:
    leg, connection = leg_of(Owner())
    connection.deadline = 9.0
    leg.response_begun(1.0, head(200))
    assert connection.deadline == 9.0
    for at in (1.1, 8.0):
        connection.deadline = at + 300.0  # as after each piece of a response
        leg.body_received(at, b"x", ended=False)
        assert connection.deadline == 1.0 + module.MAX_BODY_S


def test_owner_may_change_during_the_response() -> None:
    first, second = Owner(), Owner()
    leg, _ = leg_of(first)
    leg.response_begun(1.0, head(200))
    leg.set_owner(second)
    leg.body_received(1.1, b"{}", ended=True)
    assert first.calls == []
    assert second.calls == [(1.1, b"{}")]


def test_drop_is_idempotent() -> None:
    leg, connection = leg_of(Owner())
    leg.drop()
    leg.drop()
    assert connection.dropped

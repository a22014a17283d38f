"""The first leg of a hand-over, as its owner hears of it."""

from __future__ import annotations

from math import inf
from typing import cast

import pytest

from proxy.http.response_parser import ResponseHead
from proxy.wire.handover import prefill_leg as module
from proxy.wire.handover.prefill_leg import PrefillLeg
from proxy.wire.worker.connection import WorkerConnection, WorkerError

pytestmark = pytest.mark.plain("in place of connections, classes of its own")


class Owner:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.connection: WorkerConnection | None = None
        self.heard: list[object] = []

    def prefilled(self, now: float, answer: bytes) -> None:
        self.heard.append((now, answer))

    def begun(self, now: float, head: ResponseHead) -> None:
        self.heard.append((now, head.status))

    def received(self, now: float, body: bytes, ended: bool) -> None:
        self.heard.append((now, body, ended))

    def lost(self, now: float, trouble: WorkerError) -> None:
        self.heard.append((now, trouble))


class Connection:
    """One that can be dropped."""

    dropped = False
    deadline = inf

    def drop(self) -> None:
        self.dropped = True


def leg_of(owner: Owner) -> tuple[PrefillLeg, Connection]:
    leg, connection = PrefillLeg(owner, 60.0), Connection()
    leg.connection = cast("WorkerConnection", connection)
    return leg, connection


def head(status: int) -> ResponseHead:
    made = ResponseHead()
    made.status = status
    return made


def test_an_answer_is_collected() -> None:
    owner = Owner()
    leg, _ = leg_of(owner)
    assert not leg.is_answering
    leg.begun(1.0, head(200))
    assert leg.is_answering
    leg.received(1.1, b"ab", ended=False)
    assert owner.heard == []
    leg.received(1.2, b"c", ended=True)
    assert owner.heard == [(1.2, b"abc")]
    assert leg.connection is None


@pytest.mark.parametrize("status", [400, 404, 429, 500, 204])
def test_any_other_answer_is_the_owners(status: int) -> None:
    owner = Owner()
    leg, connection = leg_of(owner)
    leg.begun(1.0, head(status))
    leg.received(1.1, b"no", ended=True)
    assert owner.heard == [(1.0, status), (1.1, b"no", True)]
    assert owner.connection is connection


def test_its_end_is_passed_on() -> None:
    owner = Owner()
    leg, _ = leg_of(owner)
    leg.lost(2.0, WorkerError.RESET)
    assert owner.heard == [(2.0, WorkerError.RESET)]
    assert leg.connection is None


def test_an_answer_without_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSE_BYTES", 10)
    owner = Owner()
    leg, connection = leg_of(owner)
    leg.begun(1.0, head(200))
    leg.received(1.1, b"x" * 11, ended=False)
    assert owner.heard == [(1.1, WorkerError.BROKEN)]
    assert connection.dropped


def test_what_is_missing_of_an_answer_is_not_waited_for_as_long_as_for_one() -> None:
    leg, connection = leg_of(Owner())
    connection.deadline = 9.0
    leg.begun(1.0, head(200))
    assert connection.deadline == 9.0
    for at in (1.1, 8.0):
        connection.deadline = at + 300.0  # as after a piece of any answer
        leg.received(at, b"x", ended=False)
        assert connection.deadline == 1.0 + module.MAX_BODY_S


def test_the_rest_may_be_somebody_elses() -> None:
    first, second = Owner(), Owner()
    leg, _ = leg_of(first)
    leg.begun(1.0, head(200))
    leg.leave_to(second)
    leg.received(1.1, b"{}", ended=True)
    assert first.heard == []
    assert second.heard == [(1.1, b"{}")]


def test_it_can_be_dropped_at_any_time() -> None:
    leg, connection = leg_of(Owner())
    leg.drop()
    leg.drop()
    assert connection.dropped

"""Connections to workers without sockets: reuse, age, deadlines, and who hears of what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.http.response_parser import ResponseHead
from proxy.wire.settings import WireSettings
from proxy.wire.worker import connection as worker_connection
from proxy.wire.worker.connection import MAX_IDLE_S, ResponseReceiver, WorkerConnection, WorkerError
from proxy.wire.worker.pool import ConnectionPool, ConnectionPools
from proxy.wire.write_batch import WriteBatch

SETTINGS = WireSettings(connect_s=3.0, first_byte_s=60.0, idle_s=20.0)
SPEC = WorkerSpec("w0", "http://127.0.0.1:9", Role.GENERAL, "tiny")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"

pytestmark = pytest.mark.plain("callers that are classes of its own")


class Wire:
    """A transport that only remembers."""

    def __init__(self) -> None:
        self.written = b""
        self.unsent = 0
        self.closed = self.paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


@dataclass
class Listener:
    """A caller that remembers what it heard."""

    drops: bool = False
    timeout_s: float = 60.0
    connection: WorkerConnection | None = None
    heard: list[object] = field(default_factory=list)
    more_s: list[float] = field(default_factory=list)

    def begun(self, now: float, head: ResponseHead) -> None:
        del now
        self.heard.append(head.status)
        if self.drops and self.connection is not None:
            self.connection.drop()

    def received(self, now: float, body: bytes, ended: bool) -> None:
        del now
        self.heard.append((body, ended))

    def extra_wait_s(self, now: float) -> float:
        del now
        return self.more_s.pop(0) if self.more_s else 0.0

    def lost(self, now: float, trouble: WorkerError) -> None:
        del now
        self.heard.append(trouble)


class AtOnce(WriteBatch):
    """Writes without waiting for the loop, which these tests have none of."""

    def write(self, transport: Any, *pieces: bytes) -> None:
        transport.write(b"".join(pieces))


class Quick(ConnectionPool):
    """A pool whose connections are made at once."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(SPEC, SETTINGS, lambda: self.now, AtOnce())
        self.wires: dict[WorkerConnection, Wire] = {}

    def open_for(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        connection = WorkerConnection(self)
        caller.connection = connection
        self.open.add(connection)
        connection.send(now, caller, request)
        wire = self.wires[connection] = Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]

    def asked(self, *, drops: bool = False) -> tuple[Listener, WorkerConnection, Wire]:
        listener = Listener(drops)
        self.send(self.now, listener, (b"request",))
        assert listener.connection is not None
        return listener, listener.connection, self.wires[listener.connection]

    def used(self) -> tuple[Listener, WorkerConnection, Wire]:
        """Ask on a connection that served before."""
        _, first, _ = self.asked()
        first.data_received(HEAD + b"abc")
        listener, connection, wire = self.asked()
        assert connection is first
        return listener, connection, wire


@pytest.fixture
def pool() -> Quick:
    return Quick()


def test_an_answer_is_heard_in_pieces(pool: Quick) -> None:
    listener, connection, wire = pool.asked()
    assert wire.written == b"request"
    for piece in (HEAD[:9], HEAD[9:], b"a", b"bc"):
        connection.data_received(piece)
    assert listener.heard == [200, (b"a", False), (b"bc", True)]
    assert pool.idle == [connection]


def test_the_connection_used_last_is_used_first(pool: Quick) -> None:
    first, second = pool.asked()[1], pool.asked()[1]
    for connection in (first, second):
        connection.data_received(HEAD + b"abc")
    assert pool.asked()[1] is second
    assert pool.asked()[1] is first


def test_a_closed_connection_is_passed_over(pool: Quick) -> None:
    _, first, wire = pool.asked()
    first.data_received(HEAD + b"abc")
    wire.closed = True
    assert pool.asked()[1] is not first


def test_an_idle_connection_is_given_up_before_the_worker_does(pool: Quick) -> None:
    _, connection, wire = pool.asked()
    connection.data_received(HEAD + b"abc")
    assert connection.deadline == pool.now + MAX_IDLE_S
    pool.sweep(pool.now + MAX_IDLE_S + 0.1)
    assert wire.closed
    assert not pool.idle
    assert not pool.open


@pytest.fixture
def confirmed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Have the kernel say how many bytes of a request are left that the worker's has not taken."""

    def say(left: int | None) -> None:
        monkeypatch.setattr(worker_connection, "unacknowledged", lambda _: left)

    return say


def test_an_undelivered_request_is_resent(
    pool: Quick, confirmed: Callable[[int | None], None]
) -> None:
    listener, connection, wire = pool.used()
    confirmed(len(b"request"))
    connection.eof_received()
    connection.connection_lost(None)
    assert wire.closed
    assert listener.heard == []
    assert listener.connection is not connection
    assert listener.connection is not None
    assert pool.wires[listener.connection].written == b"request"
    listener.connection.eof_received()
    assert listener.heard == [WorkerError.RESET]


@pytest.mark.parametrize("left", [0, 1, len(b"request") - 1, None])
def test_a_request_that_may_have_been_read_does_not(
    pool: Quick, confirmed: Callable[[int | None], None], left: int | None
) -> None:
    listener, connection, _ = pool.used()
    confirmed(left)
    connection.eof_received()
    connection.connection_lost(None)
    assert listener.heard == [WorkerError.RESET]
    assert listener.connection is connection


@pytest.mark.parametrize("what", ["fresh", "heard", "reset", "broken pipe"])
def test_nor_one_on_a_connection_that_was_not_closed_while_idle(
    pool: Quick, confirmed: Callable[[int | None], None], what: str
) -> None:
    """A reset does not say how much of the request had come."""
    listener, connection, _ = pool.asked() if what == "fresh" else pool.used()
    confirmed(len(b"request"))
    if what == "heard":
        connection.data_received(b"HTTP")
    if what == "reset":
        connection.connection_lost(ConnectionResetError())
    elif what == "broken pipe":
        connection.connection_lost(BrokenPipeError())
    else:
        connection.eof_received()
    assert listener.heard == [WorkerError.RESET]
    assert listener.connection is connection


def test_a_body_that_ends_with_its_connection(pool: Quick) -> None:
    listener, connection, _ = pool.asked()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
    connection.eof_received()
    connection.connection_lost(None)
    assert listener.heard == [200, (b"abc", False), (b"", True)]
    assert not pool.open


def test_a_reset_is_no_end(pool: Quick) -> None:
    listener, connection, _ = pool.asked()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
    connection.connection_lost(ConnectionResetError())
    assert listener.heard == [200, (b"abc", False), WorkerError.RESET]


def test_what_is_no_answer_is_broken(pool: Quick) -> None:
    listener, connection, wire = pool.asked()
    connection.data_received(b"220 smtp\r\n")
    assert listener.heard == [WorkerError.BROKEN]
    assert wire.closed


def test_a_worker_that_speaks_unasked_is_hung_up_on(pool: Quick) -> None:
    _, connection, wire = pool.asked()
    connection.data_received(HEAD + b"abc")
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert wire.closed
    assert not pool.idle


def test_surplus_bytes_end_the_connection_not_the_answer(pool: Quick) -> None:
    listener, connection, wire = pool.asked()
    connection.data_received(HEAD + b"abcd")
    assert listener.heard == [200, (b"abc", True)]
    assert wire.closed


def test_an_answer_before_the_whole_request_is_sent_ends_the_connection(pool: Quick) -> None:
    listener, connection, wire = pool.asked()
    wire.unsent = 1
    connection.data_received(HEAD + b"abc")
    assert listener.heard == [200, (b"abc", True)]
    assert wire.closed
    assert not pool.idle


def test_a_caller_that_drops_the_connection_hears_no_more(pool: Quick) -> None:
    listener, connection, wire = pool.asked(drops=True)
    connection.data_received(HEAD + b"abc")
    assert listener.heard == [200]
    assert wire.closed
    assert not pool.open


def test_patience(pool: Quick) -> None:
    listener, connection, _ = pool.asked()
    assert connection.deadline == pool.now + 60
    pool.now += 50
    connection.data_received(HEAD)
    assert connection.deadline == 160  # a head is not what the client waits for
    connection.data_received(b"a")
    assert connection.deadline == pool.now + 20
    pool.sweep(pool.now + 19)
    assert WorkerError.TIMEOUT not in listener.heard
    pool.sweep(pool.now + 21)
    assert listener.heard[-1] is WorkerError.TIMEOUT


def test_a_caller_may_have_more_patience_once_it_is_over(pool: Quick) -> None:
    listener, connection, _ = pool.asked()
    listener.more_s = [30.0, 5.0]
    pool.sweep(161.0)
    assert connection.deadline == 191.0
    pool.sweep(192.0)
    assert (connection.deadline, listener.heard) == (197.0, [])
    pool.sweep(198.0)
    assert listener.heard == [WorkerError.TIMEOUT]


def test_but_not_between_two_pieces(pool: Quick) -> None:
    listener, connection, _ = pool.asked()
    listener.more_s = [30.0]
    connection.data_received(HEAD + b"a")
    pool.sweep(pool.now + 21)
    assert listener.heard[-1] is WorkerError.TIMEOUT


@pytest.mark.parametrize("timeout_s", [7.0, 600.0, inf])
def test_a_worker_has_as_long_as_its_caller_says(pool: Quick, timeout_s: float) -> None:
    listener = Listener(timeout_s=timeout_s)
    pool.send(pool.now, listener, (b"request",))
    assert listener.connection is not None
    assert listener.connection.deadline == pool.now + timeout_s


def test_silence_of_a_worker_that_is_not_listened_to_does_not_count(pool: Quick) -> None:
    listener, connection, wire = pool.asked()
    connection.data_received(HEAD + b"a")
    connection.pause()
    connection.data_received(b"b")  # was on its way
    assert wire.paused
    assert connection.deadline == inf
    connection.resume(500.0)
    assert not wire.paused
    assert connection.deadline == 520
    connection.pause()
    connection.data_received(b"c")
    assert listener.heard[-1] == (b"c", True)
    assert not wire.paused  # or the next answer would never be read


def test_nor_does_it_cost_the_patience_with_an_answer_that_has_not_begun(pool: Quick) -> None:
    """Of requests in turn: the client was slow to read the answer before."""
    listener, connection, _ = pool.asked()
    connection.pause()
    connection.resume(110.0)
    assert connection.deadline == 110 + listener.timeout_s
    connection.data_received(HEAD + b"a")
    assert connection.deadline == pool.now + SETTINGS.idle_s


def test_pools_follow_the_fleet() -> None:
    fleet, pools = Fleet(), ConnectionPools(SETTINGS, lambda: 0.0, AtOnce())
    old = pools.of(fleet.roster.add(SPEC))
    assert pools.of(fleet.roster.add(WorkerSpec("w1", SPEC.url, Role.LONG, "tiny"))) is not old
    fleet.roster.remove("w0")
    same = fleet.roster.add(WorkerSpec("w0", SPEC.url, Role.SHORT, "tiny"))
    assert pools.of(same) is old
    fleet.roster.remove("w0")
    keyed = fleet.roster.add(WorkerSpec("w0", SPEC.url, Role.SHORT, "tiny", api_key="k"))
    assert pools.of(keyed) is not old
    assert pools.of(keyed).authorization == b"Authorization: Bearer k\r\n"
    assert pools.of(keyed).host == b"127.0.0.1:9\r\n"

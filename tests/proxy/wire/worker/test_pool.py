"""Connections to workers without sockets: reuse, age, deadlines, and calls to their owners."""

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
from proxy.wire.worker.connection import (
    ConnectionPool,
    ResponseReceiver,
    WorkerConnection,
    WorkerError,
)
from proxy.wire.worker.pool import ConnectionPools
from proxy.wire.write_batch import WriteBatch

SETTINGS = WireSettings(connect_s=3.0, first_byte_s=60.0, idle_s=20.0)
SPEC = WorkerSpec("w0", "http://127.0.0.1:9", Role.GENERAL, "tiny")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"

pytestmark = pytest.mark.plain("classes of its own as callers")


class FakeTransport:
    """A transport that records what is written."""

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
    """A caller that records its calls."""

    drops: bool = False
    timeout_s: float = 60.0
    connection: WorkerConnection | None = None
    calls: list[object] = field(default_factory=list)
    more_s: list[float] = field(default_factory=list)

    def response_begun(self, now: float, head: ResponseHead) -> None:
        del now
        self.calls.append(head.status)
        if self.drops and self.connection is not None:
            self.connection.drop()

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        del now
        self.calls.append((body, ended))

    def extra_wait_s(self, now: float) -> float:
        del now
        return self.more_s.pop(0) if self.more_s else 0.0

    def connection_failed(self, now: float, trouble: WorkerError) -> None:
        del now
        self.calls.append(trouble)


class ImmediateWrites(WriteBatch):
    """Writes at once, without an event loop."""

    def write(self, transport: Any, *pieces: bytes) -> None:
        transport.write(b"".join(pieces))


class ImmediatePool(ConnectionPool):
    """A pool whose connections are made at once."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(SPEC, SETTINGS, lambda: self.now, ImmediateWrites())
        self.transports: dict[WorkerConnection, FakeTransport] = {}

    def open_for(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        connection = WorkerConnection(self)
        caller.connection = connection
        self.open.add(connection)
        connection.send(now, caller, request)
        transport = self.transports[connection] = FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]

    def send_request(
        self, *, drops: bool = False
    ) -> tuple[Listener, WorkerConnection, FakeTransport]:
        listener = Listener(drops)
        self.send(self.now, listener, (b"request",))
        assert listener.connection is not None
        return listener, listener.connection, self.transports[listener.connection]

    def send_on_used(self) -> tuple[Listener, WorkerConnection, FakeTransport]:
        """Send a request on a connection that has served another."""
        _, first, _ = self.send_request()
        first.data_received(HEAD + b"abc")
        listener, connection, transport = self.send_request()
        assert connection is first
        return listener, connection, transport


@pytest.fixture
def pool() -> ImmediatePool:
    return ImmediatePool()


def test_last_used_open_connection_is_used_first(pool: ImmediatePool) -> None:
    first, second, third = [pool.send_request()[1] for _ in range(3)]
    for connection in (first, second, third):
        connection.data_received(HEAD + b"abc")
    pool.transports[second].closed = True
    assert pool.send_request()[1] is third
    assert pool.send_request()[1] is first


@pytest.fixture
def set_unacknowledged(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Return a function that sets how many sent bytes the kernel reports as unacknowledged."""

    def patch(left: int | None) -> None:
        monkeypatch.setattr(worker_connection, "unacknowledged", lambda _: left)

    return patch


def test_undelivered_request_is_resent(
    pool: ImmediatePool, set_unacknowledged: Callable[[int | None], None]
) -> None:
    listener, connection, transport = pool.send_on_used()
    set_unacknowledged(len(b"request"))
    connection.eof_received()
    connection.connection_lost(None)
    assert transport.closed
    assert listener.calls == []
    assert listener.connection is not connection
    assert listener.connection is not None
    assert pool.transports[listener.connection].written == b"request"
    listener.connection.eof_received()
    assert listener.calls == [WorkerError.RESET]


@pytest.mark.parametrize("left", [0, 1, len(b"request") - 1, None])
def test_request_that_may_have_been_read_is_not_resent(
    pool: ImmediatePool, set_unacknowledged: Callable[[int | None], None], left: int | None
) -> None:
    listener, connection, _ = pool.send_on_used()
    set_unacknowledged(left)
    connection.eof_received()
    connection.connection_lost(None)
    assert listener.calls == [WorkerError.RESET]
    assert listener.connection is connection


@pytest.mark.parametrize("case", ["fresh", "heard", "reset", "broken pipe"])
def test_request_is_resent_only_after_a_close_while_idle(
    pool: ImmediatePool, set_unacknowledged: Callable[[int | None], None], case: str
) -> None:
    """A reset does not show how much of the request was read."""
    listener, connection, _ = pool.send_request() if case == "fresh" else pool.send_on_used()
    set_unacknowledged(len(b"request"))
    if case == "heard":
        connection.data_received(b"HTTP")
    if case == "reset":
        connection.connection_lost(ConnectionResetError())
    elif case == "broken pipe":
        connection.connection_lost(BrokenPipeError())
    else:
        connection.eof_received()
    assert listener.calls == [WorkerError.RESET]
    assert listener.connection is connection


@pytest.mark.parametrize("proper", [True, False], ids=["close", "reset"])
def test_close_ends_a_body_without_framing_and_a_reset_breaks_it(
    pool: ImmediatePool, proper: bool
) -> None:
    listener, connection, _ = pool.send_request()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
    if proper:
        connection.eof_received()
    connection.connection_lost(None if proper else ConnectionResetError())
    assert listener.calls[:2] == [200, (b"abc", False)]
    assert listener.calls[2:] == [(b"", True) if proper else WorkerError.RESET]
    assert not pool.open


def test_unsolicited_data_closes_the_connection(pool: ImmediatePool) -> None:
    _, connection, transport = pool.send_request()
    connection.data_received(HEAD + b"abc")
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert transport.closed
    assert not pool.idle


@pytest.mark.parametrize("surplus", [b"d", b""], ids=["surplus bytes", "an unsent request"])
def test_connection_is_not_kept_after_a_response_with(pool: ImmediatePool, surplus: bytes) -> None:
    listener, connection, transport = pool.send_request()
    transport.unsent = not surplus
    connection.data_received(HEAD + b"abc" + surplus)
    assert listener.calls == [200, (b"abc", True)]
    assert transport.closed
    assert not pool.idle


def test_caller_that_drops_the_connection_gets_no_more_calls(pool: ImmediatePool) -> None:
    listener, connection, transport = pool.send_request(drops=True)
    connection.data_received(HEAD + b"abc")
    assert listener.calls == [200]
    assert transport.closed
    assert not pool.open


def test_timeouts_of_first_byte_and_of_pieces(pool: ImmediatePool) -> None:
    listener, connection, _ = pool.send_request()
    assert connection.deadline == pool.now + 60
    pool.now += 50
    for piece in (HEAD[:9], HEAD[9:]):
        connection.data_received(piece)
        assert connection.deadline == 160  # a head alone does not extend it
    connection.data_received(b"a")
    assert connection.deadline == pool.now + 20
    listener.more_s = [30.0]  # is not asked for between pieces
    pool.sweep(pool.now + 19)
    assert WorkerError.TIMEOUT not in listener.calls
    pool.sweep(pool.now + 21)
    assert listener.calls[-1] is WorkerError.TIMEOUT


def test_caller_may_extend_the_first_byte_timeout(pool: ImmediatePool) -> None:
    listener, connection, _ = pool.send_request()
    listener.more_s = [30.0, 5.0]
    pool.sweep(161.0)
    assert connection.deadline == 191.0
    pool.sweep(192.0)
    assert (connection.deadline, listener.calls) == (197.0, [])
    pool.sweep(198.0)
    assert listener.calls == [WorkerError.TIMEOUT]


def test_paused_connection_has_no_deadline(pool: ImmediatePool) -> None:
    listener, connection, transport = pool.send_request()
    connection.data_received(HEAD + b"a")
    connection.pause()
    connection.data_received(b"b")  # was already sent
    assert transport.paused
    assert connection.deadline == inf
    connection.resume(500.0)
    assert not transport.paused
    assert connection.deadline == 520
    connection.pause()
    connection.data_received(b"c")
    assert listener.calls[-1] == (b"c", True)
    assert not transport.paused  # else the next response would not be read


def test_resume_before_a_response_restarts_the_first_byte_timeout(pool: ImmediatePool) -> None:
    """Example: the client was slow to read the response before."""
    listener, connection, _ = pool.send_request()
    connection.pause()
    connection.resume(110.0)
    assert connection.deadline == 110 + listener.timeout_s
    connection.data_received(HEAD + b"a")
    assert connection.deadline == pool.now + SETTINGS.idle_s


def test_connection_dropped_while_opening_is_closed(pool: ImmediatePool) -> None:
    connection, transport = WorkerConnection(pool), FakeTransport()
    connection.drop()
    connection.connection_made(transport)  # type: ignore[arg-type]
    assert transport.closed


def test_pool_of_an_old_key_is_kept_until_its_requests_end(pool: ImmediatePool) -> None:
    fleet, pools = Fleet(), ConnectionPools(SETTINGS, lambda: 0.0, ImmediateWrites())
    pools._pools["w0"] = pool
    _, idle, unused = pool.send_request()
    _, _, used = pool.send_request()
    idle.data_received(HEAD + b"abc")
    keyed = fleet.roster.add(WorkerSpec("w0", SPEC.url, Role.GENERAL, "tiny", api_key="k"))
    assert pools.pool_for(keyed) is not pool
    assert (unused.closed, used.closed) == (True, False)
    pools.close()
    assert used.closed


def test_pools_follow_the_fleet() -> None:
    fleet, pools = Fleet(), ConnectionPools(SETTINGS, lambda: 0.0, ImmediateWrites())
    old = pools.pool_for(fleet.roster.add(SPEC))
    assert (
        pools.pool_for(fleet.roster.add(WorkerSpec("w1", SPEC.url, Role.LONG, "tiny"))) is not old
    )
    fleet.roster.remove("w0")
    same = fleet.roster.add(WorkerSpec("w0", SPEC.url, Role.SHORT, "tiny"))
    assert pools.pool_for(same) is old
    fleet.roster.remove("w0")
    keyed = fleet.roster.add(WorkerSpec("w0", SPEC.url, Role.SHORT, "tiny", api_key="k"))
    assert pools.pool_for(keyed) is not old
    assert pools.pool_for(keyed).authorization == b"Authorization: Bearer k\r\n"
    assert pools.pool_for(keyed).host == b"127.0.0.1:9\r\n"

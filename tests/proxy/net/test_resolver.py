"""Names that are looked up slowly, not at all, or anew; and connections by them."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from proxy.health.http_client import HttpClient
from proxy.net import resolver as resolver_module
from proxy.net.resolver import (
    MAX_THREADS,
    RESOLVER,
    Addresses,
    NoAddressAnswersError,
    Resolver,
    connect,
    resolve,
)
from proxy.net.tls import client_context, server_context
from tests.proxy.certificates import Authority
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually, sockets

ON = ("asyncio", "uvloop")  # which has look-ups and connections of its own
MOST = 1 << 20
NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_ANSWER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class FakeResolver:
    """Knows some names, takes as long as the test wants over others, and counts."""

    def __init__(self) -> None:
        self.known: dict[str, Addresses | Exception] = {}
        self.slow: dict[str, threading.Event] = {}
        self.asked: list[str] = []

    def ask(self, host: str) -> Addresses:
        self.asked.append(host)
        if (rest := self.slow.get(host)) is not None:
            rest.wait(30.0)
        found = self.known.get(host, NO_SUCH_NAME)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeResolver]:
    """Stand in for the system's, with nothing known from before."""
    here = FakeResolver()
    fresh = Resolver(here.ask)
    for part in ("_ask", "_known", "_under_way"):
        monkeypatch.setattr(RESOLVER, part, getattr(fresh, part))
    yield here
    for rest in here.slow.values():
        rest.set()
    for _ in range(1000):  # or a thread that is about to end tells the next test what it found
        if not fresh._under_way:
            break
        time.sleep(0.01)
    assert not fresh._under_way


def age(host: str) -> None:
    """Make what is known of a name too old to be used as it is."""
    RESOLVER.doubt(host)


async def gives_up(host: str) -> None:
    """Ask where a name is, and wait no longer than a moment."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await RESOLVER.find(host)


async def test_names_that_are_slow_keep_no_other_waiting(resolver: FakeResolver) -> None:
    resolver.known["well"] = ("10.0.0.1",)
    for number in range(40):
        resolver.slow[f"gone{number}"] = threading.Event()
        await gives_up(f"gone{number}")
    assert await RESOLVER.find("well") == ("10.0.0.1",)


async def test_a_name_is_looked_up_once_at_a_time(resolver: FakeResolver) -> None:
    resolver.slow["gone"] = rest = threading.Event()
    resolver.known["gone"] = ("10.0.0.1",)
    for _ in range(10):
        await gives_up("gone")
    asking = [asyncio.create_task(RESOLVER.find("gone")) for _ in range(5)]
    rest.set()
    assert await asyncio.gather(*asking) == [("10.0.0.1",)] * 5
    assert resolver.asked == ["gone"]


async def test_what_is_found_when_nobody_waits_any_more_is_kept(resolver: FakeResolver) -> None:
    resolver.slow["slow"] = rest = threading.Event()
    resolver.known["slow"] = ("10.0.0.1",)
    await gives_up("slow")
    rest.set()
    await eventually(lambda: "slow" in RESOLVER._known)
    assert await RESOLVER.find("slow") == ("10.0.0.1",)
    assert resolver.asked == ["slow"]


async def test_who_gives_up_leaves_the_others_their_answer(resolver: FakeResolver) -> None:
    resolver.slow["slow"] = rest = threading.Event()
    resolver.known["slow"] = ("10.0.0.1",)
    one, other = (asyncio.create_task(RESOLVER.find("slow")) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    with suppress(asyncio.CancelledError):
        await one
    rest.set()
    assert await other == ("10.0.0.1",)


async def test_what_was_found_before_will_do_while_a_look_up_takes_long(
    resolver: FakeResolver,
) -> None:
    resolver.known["w0"] = ("10.0.0.1",)
    await RESOLVER.find("w0")
    age("w0")
    resolver.slow["w0"] = threading.Event()
    assert await RESOLVER.find("w0") == ("10.0.0.1",)
    assert await RESOLVER.find("w0") == ("10.0.0.1",)
    assert resolver.asked == ["w0", "w0"]


async def test_or_when_the_resolver_has_no_answer(resolver: FakeResolver) -> None:
    resolver.known["w0"] = ("10.0.0.1",)
    await RESOLVER.find("w0")
    age("w0")
    resolver.known["w0"] = NO_ANSWER
    assert await RESOLVER.find("w0") == ("10.0.0.1",)


async def test_but_not_when_there_is_no_such_name_any_more(resolver: FakeResolver) -> None:
    """Its address may be another's by now."""
    resolver.known["w0"] = ("10.0.0.1",)
    await RESOLVER.find("w0")
    age("w0")
    resolver.known["w0"] = NO_SUCH_NAME
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="not known"):
            await RESOLVER.find("w0")


async def test_a_name_that_could_not_be_looked_up_is_not_waited_for(resolver: FakeResolver) -> None:
    """Its worker's requests may go to another at once; when it is found, that is where it is."""
    resolver.known["gone"] = NO_ANSWER
    with pytest.raises(socket.gaierror, match="Temporary"):
        await RESOLVER.find("gone")
    resolver.slow["gone"] = rest = threading.Event()
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="Temporary"):
            await RESOLVER.find("gone")
    resolver.known["gone"] = ("10.0.0.1",)
    rest.set()
    await eventually(lambda: not RESOLVER._under_way)
    assert await RESOLVER.find("gone") == ("10.0.0.1",)
    assert resolver.asked == ["gone", "gone"]


async def test_old_names_are_looked_up(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.known["w0"] = ("10.0.0.1",)
    await RESOLVER.find("w0")
    resolver.known["w0"] = ("10.0.0.2",)
    assert await RESOLVER.find("w0") == ("10.0.0.1",)
    monkeypatch.setattr(resolver_module.time, "monotonic", lambda: 1e12)
    assert await RESOLVER.find("w0") == ("10.0.0.2",)


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%lo"])
async def test_an_address_is_not_looked_up(resolver: FakeResolver, host: str) -> None:
    assert await RESOLVER.find(host) == (host,)
    assert resolver.asked == []


async def test_more_slow_names_than_threads(resolver: FakeResolver) -> None:
    """The last waits for its turn, and needs not wait where it was found before."""
    resolver.known |= {"old": ("10.0.0.1",), "new": ("10.0.0.2",)}
    await RESOLVER.find("old")
    age("old")
    for number in range(MAX_THREADS):
        resolver.slow[f"gone{number}"] = threading.Event()
        await gives_up(f"gone{number}")
    assert await RESOLVER.find("old") == ("10.0.0.1",)
    await gives_up("new")
    assert "new" not in resolver.asked
    resolver.slow["gone7"].set()
    assert await RESOLVER.find("new") == ("10.0.0.2",)


async def test_no_thread_is_to_be_had(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver.known["w0"] = ("10.0.0.1",)
    own = Resolver(resolver.ask)  # or a thread that is about to end may still look it up
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="no thread") as caught:
            await own.find("w0")
    assert caught.value.errno == errno.ENOMEM
    assert await own.find("w0") == ("10.0.0.1",)


async def test_the_system_is_asked() -> None:
    assert {"127.0.0.1", "::1"} & {*resolve("localhost")}
    with pytest.raises(UnicodeError):
        await RESOLVER.look_up("a" * 70)


# Connections


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    """Listen on 127.0.0.1."""
    fake = FakeWorker()
    await fake.listen()
    yield fake
    await fake.stop()


def port_of(worker: FakeWorker) -> int:
    return int(worker.url.rpartition(":")[2])


async def test_each_address_of_a_name_is_tried(resolver: FakeResolver, worker: FakeWorker) -> None:
    resolver.known["w0.test"] = ("127.0.0.2", "127.0.0.1")
    transport, _ = await connect(asyncio.Protocol, "w0.test", port_of(worker), None)
    assert transport.get_extra_info("peername")[0] == "127.0.0.1"
    transport.close()
    resolver.known["none.test"] = ("127.0.0.2", "127.0.0.3")
    with pytest.raises(NoAddressAnswersError, match=r"Errno 111.*; .*Errno 111") as error:
        await connect(asyncio.Protocol, "none.test", port_of(worker), None)
    assert [why.errno for why in error.value.errors] == [errno.ECONNREFUSED] * 2


@pytest.fixture
async def hole() -> AsyncIterator[FakeWorker]:
    """Let connections to a port of 127.0.0.1 hang."""
    fake = FakeWorker()
    await fake.listen()
    await fake.hang()
    yield fake
    await fake.stop()


async def test_the_next_address_has_its_own_time(resolver: FakeResolver, hole: FakeWorker) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.2", hole.port)
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    try:
        async with asyncio.timeout(10):
            transport, _ = await connect(asyncio.Protocol, "w0.test", hole.port, None)
    finally:
        server.close()
    assert transport.get_extra_info("peername")[0] == "127.0.0.2"
    raw = transport.get_extra_info("socket")
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    transport.close()


async def test_one_that_is_slow_to_answer_is_waited_for(
    resolver: FakeResolver, hole: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver_module, "NEXT_ADDRESS_DELAY_S", 0.0)
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.2")
    connecting = asyncio.create_task(connect(asyncio.Protocol, "w0.test", hole.port, None))
    await asyncio.wait([connecting], timeout=0.1)  # by then the other has refused
    await hole.wake()
    transport, _ = await connecting
    assert transport.get_extra_info("peername")[0] == "127.0.0.1"
    transport.close()


async def test_nothing_is_left_of_a_cancelled_one(resolver: FakeResolver, hole: FakeWorker) -> None:
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.1")
    before = sockets()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.4):
            await connect(asyncio.Protocol, "w0.test", hole.port, None)
    await eventually(lambda: sockets() == before)
    assert len(asyncio.all_tasks()) == 1
    assert not RESOLVER._known["w0.test"].until


async def test_where_the_first_to_answer_breaks_off_another_is_tried_again(
    resolver: FakeResolver, hole: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver_module, "NEXT_ADDRESS_DELAY_S", 0.0)
    authority = Authority(tmp_path)
    hole.tls = server_context(authority.port("w0", host="w0.test"))

    async def breaks_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hole.wake()
        writer.transport.abort()

    server = await asyncio.start_server(breaks_off, "127.0.0.2", hole.port)
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.2")
    tls = client_context(authority.worker_tls())
    try:
        async with asyncio.timeout(10):
            transport, _ = await connect(asyncio.Protocol, "w0.test", hole.port, tls)
    finally:
        server.close()
    assert transport.get_extra_info("peername")[0] == "127.0.0.1"
    transport.close()


async def test_each_address_has_its_scope(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[tuple[object, ...]] = []

    class Refused(socket.socket):
        def connect(self, address: tuple[object, ...]) -> None:  # type: ignore[override]
            met.append(address)
            raise ConnectionRefusedError

    monkeypatch.setattr(resolver_module.socket, "socket", Refused)
    resolver.known["w0.test"] = ("fe80::1%1", "fe80::2%1")
    with pytest.raises(OSError, match="; "):
        async with asyncio.timeout(10):
            await connect(asyncio.Protocol, "w0.test", 9, None)
    assert met[0] == ("fe80::1", 9, 0, 1)


async def test_a_worker_that_moved_is_found(resolver: FakeResolver, worker: FakeWorker) -> None:
    resolver.known["w0.test"] = ("127.0.0.2",)
    with closing(HttpClient(f"http://w0.test:{port_of(worker)}", None, None)) as asker:
        with pytest.raises(ConnectionRefusedError):
            await asker.get("/health", MOST)
        resolver.known["w0.test"] = ("127.0.0.1",)
        assert (await asker.get("/health", MOST))[0] == 200


async def test_one_on_ipv6(resolver: FakeResolver) -> None:
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    port = server.sockets[0].getsockname()[1]
    resolver.known["six.test"] = ("::1",)
    for host in ("six.test", "::1"):
        transport, _ = await connect(asyncio.Protocol, host, port, None)
        assert transport.get_extra_info("peername")[0] == "::1"
        transport.abort()
    server.close()


@pytest.mark.parametrize("before", [(), ("127.0.0.2",)], ids=["one", "two"])
async def test_certificates_are_for_names(
    resolver: FakeResolver, tmp_path: Path, before: Addresses
) -> None:
    authority = Authority(tmp_path)
    met = client_context(authority.worker_tls())
    addresses = (*before, "127.0.0.1")
    resolver.known |= {"w0.test": addresses, "w1.test": addresses}
    fake = FakeWorker()
    fake.tls = server_context(authority.port("w0", host="w0.test"))
    await fake.listen()
    transport, _ = await connect(asyncio.Protocol, "w0.test", port_of(fake), met)
    transport.close()
    with pytest.raises(OSError, match="certificate"):
        await connect(asyncio.Protocol, "w1.test", port_of(fake), met)
    await fake.stop()

"""Name resolution that is slow, fails or changes, and connections by name."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
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
from tests.proxy.running import serving
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually, sockets

EVENT_LOOPS = ("uvloop",)  # as the router
MAX_BYTES = 1 << 20
NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_ANSWER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class FakeResolver:
    """A resolver that knows some names, blocks on others, and records look-ups."""

    def __init__(self) -> None:
        self.known: dict[str, Addresses | Exception] = {}
        self.slow: dict[str, threading.Event] = {}
        self.looked_up: list[str] = []

    def ask(self, host: str) -> Addresses:
        self.looked_up.append(host)
        if (release := self.slow.get(host)) is not None:
            release.wait(30.0)
        found = self.known.get(host, NO_SUCH_NAME)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeResolver]:
    """Replace the system's resolver, with nothing cached."""
    fake = FakeResolver()
    fresh = Resolver(fake.ask)
    for part in ("_ask", "_cached", "_under_way"):
        monkeypatch.setattr(RESOLVER, part, getattr(fresh, part))
    yield fake
    for release in fake.slow.values():
        release.set()
    for _ in range(1000):  # a late thread must not affect the next test
        if not fresh._under_way:
            break
        time.sleep(0.01)
    assert not fresh._under_way


async def look_up_briefly(host: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await RESOLVER.find(host)


async def test_concurrent_and_cancelled_look_ups_of_a_name_are_shared(
    resolver: FakeResolver,
) -> None:
    resolver.slow["slow"] = release = threading.Event()
    resolver.known["slow"] = ("10.0.0.1",)
    asking = [asyncio.create_task(RESOLVER.find("slow")) for _ in range(5)]
    for _ in range(10):
        await look_up_briefly("slow")
    release.set()
    assert await asyncio.gather(*asking) == [("10.0.0.1",)] * 5
    assert resolver.looked_up == ["slow"]


async def test_late_result_is_cached(resolver: FakeResolver) -> None:
    resolver.slow["slow"] = release = threading.Event()
    resolver.known["slow"] = ("10.0.0.1",)
    await look_up_briefly("slow")
    release.set()
    await eventually(lambda: "slow" in RESOLVER._cached)
    assert await RESOLVER.find("slow") == ("10.0.0.1",)
    assert resolver.looked_up == ["slow"]


@pytest.fixture
async def expired(resolver: FakeResolver) -> FakeResolver:
    """Return a resolver that has looked up `w0`, whose cached result is too old."""
    resolver.known["w0"] = ("10.0.0.1",)
    await RESOLVER.find("w0")
    RESOLVER.expire("w0")
    return resolver


async def test_expired_result_is_used_while_a_look_up_is_slow(expired: FakeResolver) -> None:
    expired.slow["w0"] = threading.Event()
    assert await RESOLVER.find("w0") == ("10.0.0.1",)
    assert await RESOLVER.find("w0") == ("10.0.0.1",)
    assert expired.looked_up == ["w0", "w0"]


async def test_expired_result_is_used_when_the_resolver_fails(expired: FakeResolver) -> None:
    expired.known["w0"] = NO_ANSWER
    assert await RESOLVER.find("w0") == ("10.0.0.1",)


async def test_expired_result_is_not_used_for_an_unknown_name(expired: FakeResolver) -> None:
    """The address may belong to another host."""
    expired.known["w0"] = NO_SUCH_NAME
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="not known"):
            await RESOLVER.find("w0")


async def test_failed_name_fails_at_once_while_looked_up_again(resolver: FakeResolver) -> None:
    """Requests go to another worker at once, until the name is found."""
    resolver.known["gone"] = NO_ANSWER
    with pytest.raises(socket.gaierror, match="Temporary"):
        await RESOLVER.find("gone")
    resolver.slow["gone"] = release = threading.Event()
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="Temporary"):
            await RESOLVER.find("gone")
    resolver.known["gone"] = ("10.0.0.1",)
    release.set()
    await eventually(lambda: not RESOLVER._under_way)
    assert await RESOLVER.find("gone") == ("10.0.0.1",)
    assert resolver.looked_up == ["gone", "gone"]


async def test_old_names_are_looked_up_again(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.known["w0"] = ("10.0.0.1",)
    await RESOLVER.find("w0")
    resolver.known["w0"] = ("10.0.0.2",)
    assert await RESOLVER.find("w0") == ("10.0.0.1",)
    monkeypatch.setattr(resolver_module.time, "monotonic", lambda: 1e12)
    assert await RESOLVER.find("w0") == ("10.0.0.2",)


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%lo"])
async def test_address_is_not_looked_up(resolver: FakeResolver, host: str) -> None:
    assert await RESOLVER.find(host) == (host,)
    assert resolver.looked_up == []


async def test_slow_names_delay_others_only_without_a_free_thread(resolver: FakeResolver) -> None:
    resolver.known |= {"old": ("10.0.0.1",), "well": ("10.0.0.2",), "new": ("10.0.0.3",)}
    await RESOLVER.find("old")
    RESOLVER.expire("old")
    for number in range(MAX_THREADS - 1):
        resolver.slow[f"gone{number}"] = threading.Event()
        await look_up_briefly(f"gone{number}")
    assert await RESOLVER.find("well") == ("10.0.0.2",)
    resolver.slow["last"] = threading.Event()
    await look_up_briefly("last")
    assert await RESOLVER.find("old") == ("10.0.0.1",)  # an expired result, without waiting
    await look_up_briefly("new")
    assert "new" not in resolver.looked_up
    resolver.slow["gone7"].set()
    assert await RESOLVER.find("new") == ("10.0.0.3",)


async def test_missing_thread_raises_enomem(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver.known["w0"] = ("10.0.0.1",)
    own_resolver = Resolver(resolver.ask)  # a late thread must not look it up
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="no thread") as caught:
            await own_resolver.find("w0")
    assert caught.value.errno == errno.ENOMEM
    assert await own_resolver.find("w0") == ("10.0.0.1",)


async def test_system_resolver_is_used() -> None:
    assert {"127.0.0.1", "::1"} & {*resolve("localhost")}
    with pytest.raises(UnicodeError):
        await RESOLVER.look_up("a" * 70)


# Connections


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = FakeWorker()
    async with serving(fake):
        yield fake


async def test_each_address_of_a_name_is_tried(resolver: FakeResolver, worker: FakeWorker) -> None:
    resolver.known["w0.test"] = ("127.0.0.2", "127.0.0.1")
    transport, _ = await connect(asyncio.Protocol, "w0.test", worker.port, None)
    assert transport.get_extra_info("peername")[0] == "127.0.0.1"
    transport.close()
    resolver.known["none.test"] = ("127.0.0.2", "127.0.0.3")
    with pytest.raises(NoAddressAnswersError, match=r"Errno 111.*; .*Errno 111") as error:
        await connect(asyncio.Protocol, "none.test", worker.port, None)
    assert [why.errno for why in error.value.errors] == [errno.ECONNREFUSED] * 2


@pytest.fixture
async def hanging(worker: FakeWorker) -> FakeWorker:
    await worker.hang()
    return worker


async def test_next_address_is_tried_after_a_delay(
    resolver: FakeResolver, hanging: FakeWorker
) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.2", hanging.port)
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    try:
        async with asyncio.timeout(10):
            transport, _ = await connect(asyncio.Protocol, "w0.test", hanging.port, None)
    finally:
        server.close()
    assert transport.get_extra_info("peername")[0] == "127.0.0.2"
    raw = transport.get_extra_info("socket")
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    transport.close()


async def test_slow_address_is_used_after_others_refuse(
    resolver: FakeResolver, hanging: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver_module, "NEXT_ADDRESS_DELAY_S", 0.0)
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.2")
    connecting = asyncio.create_task(connect(asyncio.Protocol, "w0.test", hanging.port, None))
    await asyncio.wait([connecting], timeout=0.1)  # the other address has refused then
    await hanging.wake()
    transport, _ = await connecting
    assert transport.get_extra_info("peername")[0] == "127.0.0.1"
    transport.close()


async def test_cancelled_connect_leaves_nothing(
    resolver: FakeResolver, hanging: FakeWorker
) -> None:
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.1")
    before = sockets()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.4):
            await connect(asyncio.Protocol, "w0.test", hanging.port, None)
    await eventually(lambda: sockets() == before)
    assert len(asyncio.all_tasks()) == 1
    assert not RESOLVER._cached["w0.test"].until


async def test_failed_handshake_tries_another_address(
    resolver: FakeResolver, hanging: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver_module, "NEXT_ADDRESS_DELAY_S", 0.0)
    authority = Authority(tmp_path)
    hanging.tls = server_context(authority.port("w0", host="w0.test"))

    async def wake_and_abort(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hanging.wake()
        writer.transport.abort()

    server = await asyncio.start_server(wake_and_abort, "127.0.0.2", hanging.port)
    resolver.known["w0.test"] = ("127.0.0.1", "127.0.0.2")
    tls = client_context(authority.worker_tls())
    try:
        async with asyncio.timeout(10):
            transport, _ = await connect(asyncio.Protocol, "w0.test", hanging.port, tls)
    finally:
        server.close()
    assert transport.get_extra_info("peername")[0] == "127.0.0.1"
    transport.close()


async def test_address_scope_is_used(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[tuple[object, ...]] = []

    class Refused(socket.socket):
        def connect(self, address: tuple[object, ...]) -> None:  # type: ignore[override]
            addresses.append(address)
            raise ConnectionRefusedError

    monkeypatch.setattr(resolver_module.socket, "socket", Refused)
    resolver.known["w0.test"] = ("fe80::1%1", "fe80::2%1")
    with pytest.raises(OSError, match="; "):
        async with asyncio.timeout(10):
            await connect(asyncio.Protocol, "w0.test", 9, None)
    assert addresses[0] == ("fe80::1", 9, 0, 1)


async def test_moved_worker_is_found(resolver: FakeResolver, worker: FakeWorker) -> None:
    resolver.known["w0.test"] = ("127.0.0.2",)
    with closing(HttpClient(f"http://w0.test:{worker.port}", None, None)) as client:
        with pytest.raises(ConnectionRefusedError):
            await client.get("/health", MAX_BYTES)
        resolver.known["w0.test"] = ("127.0.0.1",)
        assert (await client.get("/health", MAX_BYTES))[0] == 200


async def test_connect_over_ipv6(resolver: FakeResolver) -> None:
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
async def test_certificate_is_verified_by_name(
    resolver: FakeResolver, tmp_path: Path, before: Addresses
) -> None:
    authority = Authority(tmp_path)
    context = client_context(authority.worker_tls())
    addresses = (*before, "127.0.0.1")
    resolver.known |= {"w0.test": addresses, "w1.test": addresses}
    fake = FakeWorker()
    fake.tls = server_context(authority.port("w0", host="w0.test"))
    async with serving(fake):
        transport, _ = await connect(asyncio.Protocol, "w0.test", fake.port, context)
        transport.close()
        with pytest.raises(OSError, match="certificate"):
            await connect(asyncio.Protocol, "w1.test", fake.port, context)

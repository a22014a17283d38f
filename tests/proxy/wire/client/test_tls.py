"""TLS between clients, router and workers."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import pytest

from proxy.net.tls import server_context
from tests.proxy.certificates import Authority
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import BrokenError, chat, get
from tests.proxy.wire.site import Fake, Site, eventually

Begin = Callable[..., Awaitable[Site]]
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return the certificate authority of these tests."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def begin(start: Start, authority: Authority) -> Begin:
    """Return a function that starts a router with a certificate."""

    async def begin_tls(
        *fakes: Fake, server_tls: ssl.SSLContext | None = None, wire: dict[str, Any] | None = None
    ) -> Site:
        server_tls = server_tls or server_context(authority.port("router"))
        return await start(*(fakes or (worker(authority),)), wire=wire, tls=server_tls)

    return begin_tls


def worker(authority: Authority, *, clients: bool = False, **more: Any) -> Fake:
    """Describe a worker that serves HTTPS."""
    worker_tls = more.pop("worker_tls", None) or authority.worker_tls(
        "to-worker" if clients else None
    )
    server_tls = server_context(
        authority.port("worker", clients=clients, host=more.pop("host", "127.0.0.1"))
    )
    return Fake(tls=server_tls, worker_tls=worker_tls, **more)


async def test_chat_and_stream_over_tls(begin: Begin, authority: Authority) -> None:
    site = await begin(worker(authority, max_model_len=1_000_000))
    client = await site.client(tls=authority.client())
    answer = await client.ask(chat())
    assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "w0")
    stream = await client.ask(chat(stream=True))
    assert stream.body.count(b"data: ") == 5
    assert stream.body.endswith(b"data: [DONE]\n\n")
    large = await client.ask(chat("x" * 300_000))
    assert large.status == 200
    assert len(site.fake.connections) == 1  # kept, and used again
    version = client.writer.get_extra_info("ssl_object").version()
    assert version in ("TLSv1.2", "TLSv1.3")
    client.close()


async def test_plain_http_and_old_tls_versions_are_refused(begin: Begin) -> None:
    site = await begin()
    plain = await site.client()
    with pytest.raises((BrokenError, ConnectionError)):
        await plain.ask(get("/health"))
    assert site.wire.tls is not None
    assert site.wire.tls.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_client_certificate_is_required(
    begin: Begin, authority: Authority, tmp_path: Path
) -> None:
    site = await begin(server_tls=server_context(authority.port("strict", clients=True)))
    assert (
        await site.ask(get("/health"), tls=authority.client("client"), within=DEADLINE_S)
    ).status == 200
    stranger = Authority(tmp_path).issue("stranger")
    context = authority.client()
    with pytest.raises((BrokenError, OSError)):
        await site.ask(get("/health"), tls=context, within=DEADLINE_S)
    context.load_cert_chain(*stranger)
    with pytest.raises((BrokenError, OSError)):
        await site.ask(get("/health"), tls=context, within=DEADLINE_S)


async def test_worker_may_require_the_routers_certificate(
    begin: Begin, authority: Authority
) -> None:
    site = await begin(
        worker(authority, clients=True, name="w0"),
        worker(authority, clients=True, name="w1", worker_tls=authority.worker_tls()),
    )
    tls = authority.client()
    answers = [await site.ask(chat(), tls=tls, within=DEADLINE_S) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert {call.connection.worker.name for call in site.served()} == {"w0"}


@pytest.mark.parametrize("why", ["authority", "name"])
async def test_worker_with_a_wrong_certificate_gets_no_request(
    begin: Begin, authority: Authority, tmp_path: Path, why: str
) -> None:
    worker_tls = Authority(tmp_path).worker_tls() if why == "authority" else authority.worker_tls()
    host = "worker.example" if why == "name" else "127.0.0.1"
    site = await begin(worker(authority, worker_tls=worker_tls, host=host))
    answer = await site.ask(chat(), tls=authority.client(), within=DEADLINE_S)
    assert answer.status in (502, 503)
    assert site.fake.calls == []


async def test_verify_hostname_false_accepts_any_name(begin: Begin, authority: Authority) -> None:
    worker_tls = authority.worker_tls(verify_hostname=False)
    site = await begin(worker(authority, worker_tls=worker_tls, host="worker.example"))
    assert (await site.ask(chat(), tls=authority.client(), within=DEADLINE_S)).status == 200


async def test_client_handshake_has_a_deadline(begin: Begin, authority: Authority) -> None:
    site = await begin(wire={"client_header_s": 0.2})
    silent = await site.client()
    halting = await site.send(b"\x16\x03\x01\x02\x00\x01")
    async with asyncio.timeout(DEADLINE_S):
        for client in (silent, halting):
            with suppress(ConnectionError):
                await client.reader.read()  # to its end
    assert (await site.ask(get("/health"), tls=authority.client(), within=DEADLINE_S)).status == 200


async def test_worker_handshake_has_a_deadline(begin: Begin, authority: Authority) -> None:
    site = await begin(Fake(name="w0", worker_tls=authority.worker_tls()), wire={"connect_s": 0.2})
    answer = await site.ask(chat(), tls=authority.client(), within=DEADLINE_S)
    assert answer.status in (502, 503, 504)


@pytest.mark.parametrize("end", ["close", "cut"])
async def test_end_without_close_notify_breaks_the_response(
    begin: Begin, authority: Authority, end: str
) -> None:
    """TLS distinguishes a proper end of a body from a cut connection."""

    async def answer(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}")
        await asyncio.sleep(0.05)  # lets the data arrive
        if end == "close":
            call.close()
        else:
            raw = call.connection.transport.get_extra_info("socket")
            with socket.socket(fileno=os.dup(raw.fileno())) as underneath:
                underneath.shutdown(socket.SHUT_WR)

    site = await begin()
    site.fake.always(answer)
    client = await site.client(tls=authority.client())
    if end == "close":
        assert (await client.ask(chat())).body == b"{}"
        return
    with pytest.raises((BrokenError, OSError, asyncio.IncompleteReadError)):
        await client.ask(chat())


async def test_break_off_after_the_socket_is_gone(begin: Begin, authority: Authority) -> None:
    """The socket is gone, but `connection_lost` has not run yet."""
    site, loop = await begin(), asyncio.get_running_loop()
    client = await site.client(tls=authority.client())
    assert (await client.ask(get("/health"))).status == 200
    (connection,) = site.wire.clients
    broken_off = loop.create_future()

    def break_off_without_socket() -> None:
        if connection._transport.get_extra_info("socket") is not None:
            loop.call_soon(break_off_without_socket)
            return
        assert connection in site.wire.clients
        connection.break_off()
        broken_off.set_result(None)

    break_off_without_socket()
    client.reset()
    await asyncio.wait_for(broken_off, DEADLINE_S)


async def connect_in_thread(site: Site, authority: Authority, data: bytes) -> ssl.SSLSocket:
    """Connect as a threaded client does, which sees the connection only when it reads."""

    def connect() -> ssl.SSLSocket:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(DEADLINE_S)
        raw.connect(("127.0.0.1", site.port))
        client = authority.client().wrap_socket(raw, server_hostname="127.0.0.1")
        client.sendall(data)
        return client

    return await asyncio.to_thread(connect)


async def test_drain_does_not_wait_for_close_notify(begin: Begin, authority: Authority) -> None:
    site = await begin(wire={"linger_s": 0.1})
    with await connect_in_thread(site, authority, get("/health")) as client:
        assert (await asyncio.to_thread(client.recv, 1 << 16)).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(DEADLINE_S):
            await site.wire.drain(3600.0)
        assert not site.wire.clients


async def test_slow_reader_gets_the_whole_response(begin: Begin, authority: Authority) -> None:
    site = await begin(wire={"linger_s": 0.1})
    go, content = asyncio.Event(), b"x" * 60_000
    site.fake.always(scripts.gated(go, scripts.answer(200, content)))
    with await connect_in_thread(site, authority, chat("hi", b"Connection: close")) as client:
        await site.fake.got()
        (connection,) = site.wire.clients
        raw = connection._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        go.set()
        await eventually(lambda: connection._leaving)
        for _ in range(5):  # checks of the deadline
            connection.deadline = -inf
            await eventually(lambda: connection.deadline > 0)
        assert site.wire.clients == {connection}
        response = b""
        while piece := await asyncio.to_thread(client.recv, 1 << 16):
            response += piece
        assert response.endswith(b"\r\n\r\n" + content)

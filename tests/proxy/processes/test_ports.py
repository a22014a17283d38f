"""The ports that a supervisor keeps."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from proxy.config.fleet_file import AdminConfig, RouterConfig
from proxy.processes.ports import Ports


def config(host: str = "127.0.0.1", port: int = 0) -> RouterConfig:
    return RouterConfig(host=host, port=port, admin=AdminConfig(port=0))


@pytest.fixture
def ports() -> Iterator[Ports]:
    ports = Ports()
    yield ports
    ports.close()


def listen(ports: Ports) -> socket.socket:
    ((family, address),) = ports.addresses
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(address)
    listener.listen()
    return listener


async def test_processes_share_the_port_until_it_is_released(ports: Ports) -> None:
    await ports.reserve(config())
    assert ports.addresses[0][1] == ("127.0.0.1", ports.port)
    for listener in [listen(ports) for _ in range(2)]:
        listener.close()
    port, admin = ports.port, ports.admin_port
    ports.close()
    for number in (port, admin):
        socket.create_server(("127.0.0.1", number)).close()


async def test_address_families_share_a_port(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
    ]

    async def resolve_both(*_: object, **__: object) -> list[object]:
        return [*found, found[0]]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve_both)
    await ports.reserve(config("localhost"))
    assert [family for family, _ in ports.addresses] == [socket.AF_INET, socket.AF_INET6]
    assert {address[1] for _, address in ports.addresses} == {ports.port}


async def test_port_of_another_router_is_not_shared(ports: Ports) -> None:
    await ports.reserve(config())
    with listen(ports):
        other = Ports()
        with pytest.raises(OSError, match=f"127.0.0.1 port {ports.port}"):
            await other.reserve(config(port=ports.port))
        other.close()

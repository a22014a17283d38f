"""The ports that a supervisor keeps."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from proxy.config.models import AdminConfig, RouterConfig
from proxy.processes.ports import Ports


def asked(host: str = "127.0.0.1", port: int = 0) -> RouterConfig:
    """Ask for a port; the operators' is any."""
    return RouterConfig(host=host, port=port, admin=AdminConfig(port=0))


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Let them go in the end."""
    made = Ports()
    yield made
    made.close()


async def test_processes_share_the_port_and_listen_for_themselves(ports: Ports) -> None:
    await ports.take(asked())
    ((family, address),) = ports.addresses
    assert address == ("127.0.0.1", ports.port)
    listening = []
    for _ in range(2):
        each = socket.socket(family, socket.SOCK_STREAM)
        listening.append(each)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind(address)
        each.listen()
    for each in listening:
        each.close()


async def test_each_family_has_the_same_port(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
    ]

    async def both(*_: object, **__: object) -> list[object]:
        return [*found, found[0]]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", both)
    await ports.take(asked("localhost"))
    assert [family for family, _ in ports.addresses] == [socket.AF_INET, socket.AF_INET6]
    assert {address[1] for _, address in ports.addresses} == {ports.port}


async def test_the_port_of_a_router_that_serves_is_not_joined(ports: Ports) -> None:
    await ports.take(asked())
    ((family, address),) = ports.addresses
    with socket.socket(family, socket.SOCK_STREAM) as serving:
        serving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        serving.bind(address)
        serving.listen()
        other = Ports()
        with pytest.raises(OSError, match=f"127.0.0.1 port {ports.port}"):
            await other.take(asked(port=ports.port))
        other.close()


async def test_what_is_let_go_others_may_have(ports: Ports) -> None:
    await ports.take(asked())
    admin = ports.admin_port
    ports.close()
    socket.create_server(("127.0.0.1", admin)).close()
    socket.create_server(("127.0.0.1", ports.port)).close()

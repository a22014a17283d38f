"""Routers without keys refuse requests from foreign web pages."""

from __future__ import annotations

import pytest

from proxy.config import parse
from proxy.core.tenants.tenants import TenantSpec
from proxy.setup.settings import wire_settings
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import KEY, bearer, request

FORM = b'{"model": "tiny", "messages": []}'


def to_host(host: bytes, *headers: bytes) -> bytes:
    """Return a request whose Host header has this name."""
    return request(FORM, *headers).replace(b"Host: localhost", b"Host: " + host)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (b"http://evil.example", 403),
        (b"https://127.0.0.1.evil.example", 403),
        (b"http://10.1.2.3", 403),
        (b"null", 403),
        (b"http://[", 403),
        (b"http://localhost:3000", 200),
        (b"https://127.0.0.1:8443", 200),
        (b"http://[::1]:3000", 200),
        (b"vscode-webview://0abc", 200),
    ],
)
async def test_foreign_origin_is_refused(start: Start, origin: bytes, status: int) -> None:
    site = await start(wire={"refuses_pages": True})
    client = await site.client()
    for _ in range(3):  # the second and third head come from the cache
        assert (await client.ask(to_host(b"evil.example", b"Origin: " + origin))).status == status
        assert (await client.ask(to_host(b"llm.example"))).status == 200  # not from a web page
    assert len(site.served()) == (6 if status == 200 else 3)


async def test_origin_is_not_checked_with_a_key_or_when_the_check_is_off(start: Start) -> None:
    page = to_host(b"evil.example", b"Origin: http://evil.example")
    assert (await (await start()).ask(page)).status == 200
    guarded = await start(wire={"refuses_pages": True})
    guarded.set_tenants(TenantSpec("a"), a=KEY)
    with_key = to_host(b"evil.example", b"Origin: http://evil.example", bearer())
    assert (await guarded.ask(page)).status == 401
    assert (await guarded.ask(with_key)).status == 200


@pytest.mark.parametrize(
    ("router", "refuses"),
    [
        ("{}", True),
        ("{host: '::1'}", True),
        ("{allow_anonymous: true}", False),
        ("{host: 0.0.0.0, allow_anonymous: true}", False),
    ],
)
def test_origin_check_is_off_with_allow_anonymous(router: str, refuses: bool) -> None:
    config = parse(f"model: m\nworkers: [{{name: w, url: 'http://h:1'}}]\nrouter: {router}\n", "f")
    assert wire_settings(config).refuses_pages is refuses

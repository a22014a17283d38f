"""Who asks for no key takes nothing from web pages of elsewhere."""

from __future__ import annotations

from hashlib import sha256

import pytest

from proxy.config import parse
from proxy.core.tenants.tenants import TenantSpec
from proxy.setup.settings import wire_settings
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import request

FORM = b'{"model": "tiny", "messages": []}'


def named(host: bytes, *headers: bytes) -> bytes:
    """Write a request to a host of this name."""
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
async def test_foreign_pages_are_refused(start: Start, origin: bytes, status: int) -> None:
    site = await start(wire={"refuses_pages": True})
    client = await site.client()
    for _ in range(3):  # the next of such heads are not parsed again
        assert (await client.ask(named(b"evil.example", b"Origin: " + origin))).status == status
        assert (await client.ask(named(b"llm.example"))).status == 200  # of a program, by a proxy
    assert len(site.served()) == (6 if status == 200 else 3)


async def test_whoever_may_ask_by_a_key_or_because_all_may_is_not_asked_that(start: Start) -> None:
    page = named(b"evil.example", b"Origin: http://evil.example")
    assert (await (await start()).ask(page)).status == 200
    guarded = await start(wire={"refuses_pages": True})
    guarded.router.tenants.replace([TenantSpec("a")], {sha256(b"key-of-a").digest(): "a"})
    shown = named(
        b"evil.example", b"Origin: http://evil.example", b"Authorization: Bearer key-of-a"
    )
    assert (await guarded.ask(page)).status == 401
    assert (await guarded.ask(shown)).status == 200


@pytest.mark.parametrize(
    ("router", "refuses"),
    [
        ("{}", True),
        ("{host: '::1'}", True),
        ("{allow_anonymous: true}", False),
        ("{host: 0.0.0.0, allow_anonymous: true}", False),
    ],
)
def test_where_that_is(router: str, refuses: bool) -> None:
    config = parse(f"model: m\nworkers: [{{name: w, url: 'http://h:1'}}]\nrouter: {router}\n", "f")
    assert wire_settings(config).refuses_pages is refuses

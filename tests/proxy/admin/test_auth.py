"""Host and Origin headers that the admin API accepts."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import PlainTextResponse

from proxy.admin.auth import HostCheck
from proxy.admin.key import AdminKey


async def status(
    headers: list[tuple[str, str]], host: str = "127.0.0.1", key: AdminKey | None = None
) -> int:
    """Send a request with these headers; return its status."""
    app = HostCheck(PlainTextResponse("in"), host, key)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        answer = await client.get("http://127.0.0.1:8001/", headers=headers)
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "forbidden"
    return answer.status_code


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8001", "localhost:8001", "LOCALHOST", "[::1]:8001", "10.0.0.7:8001"],
)
async def test_local_hosts_are_accepted(host: str) -> None:
    assert await status([("Host", host)]) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8001", "localhost.evil.example", "127.0.0.1.evil.example", "",
     "[::1", "127.0.0.1@evil.example"],
)  # fmt: skip
async def test_foreign_hosts_are_refused(host: str) -> None:
    assert await status([("Host", host)]) == 403


async def test_configured_host_is_accepted() -> None:
    assert await status([("Host", "admin.internal:8001")]) == 403
    assert await status([("Host", "Admin.internal:8001")], host="admin.internal") == 200


async def test_key_allows_any_host_and_is_required() -> None:
    key = AdminKey()
    assert await status([("Host", "router.example.com")], key=key) == 403  # no key is set yet
    key.set(secret := "a-key-of-many-letters-0123456789")
    authorization = ("Authorization", f"Bearer {secret}")
    host = ("Host", "router.example.com")
    assert await status([host, authorization], key=key) == 200
    assert (
        await status([host, authorization, ("Origin", "https://router.example.com")], key=key)
        == 200
    )
    assert await status([host], key=key) == 401
    assert await status([host, authorization, ("Origin", "https://evil.example")], key=key) == 403
    assert await status([host, host, authorization], key=key) == 403


async def test_two_host_headers_are_refused() -> None:
    assert await status([("Host", "localhost"), ("Host", "localhost")]) == 403


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://127.0.0.1:8001", 200),
        ("http://127.0.0.1:9000", 403),
        ("http://evil.example", 403),
        ("http://evil.example@127.0.0.1:8001", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_only_the_own_origin_is_accepted(origin: str, expected: int) -> None:
    assert await status([("Host", "127.0.0.1:8001"), ("Origin", origin)]) == expected

"""The Host and Origin headers and the keys that the admin API accepts."""

from __future__ import annotations

import base64

import httpx
import pytest
from starlette.responses import PlainTextResponse

from proxy.admin.auth import HostCheck
from proxy.admin.key import AdminKey

KEY = "0123456789abcdef-key"
ROUTER = ("Host", "router.example.com")


async def ask(
    *headers: tuple[str, str], host: str = "127.0.0.1", key: AdminKey | None = None
) -> httpx.Response:
    app = HostCheck(PlainTextResponse("in"), host, key)
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        answer = await client.get("http://127.0.0.1:8001/", headers=encoded)
    if answer.status_code != 200:
        code = {401: "unauthorized", 403: "forbidden"}[answer.status_code]
        assert answer.json()["error"]["code"] == code
    return answer


async def status(
    *headers: tuple[str, str], host: str = "127.0.0.1", key: AdminKey | None = None
) -> int:
    return (await ask(*headers, host=host, key=key)).status_code


def basic(password: str, user: str = "admin") -> str:
    """Return an Authorization header of a browser."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def key() -> AdminKey:
    key = AdminKey()
    key.set(KEY)
    return key


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8001", "localhost:8001", "LOCALHOST", "[::1]:8001", "10.0.0.7:8001"],
)
async def test_local_hosts_are_accepted(host: str) -> None:
    assert await status(("Host", host)) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8001", "localhost.evil.example", "127.0.0.1.evil.example", "",
     "[::1", "127.0.0.1@evil.example"],
)  # fmt: skip
async def test_foreign_hosts_are_refused(host: str) -> None:
    assert await status(("Host", host)) == 403


async def test_configured_host_is_accepted() -> None:
    assert await status(("Host", "admin.internal:8001")) == 403
    assert await status(("Host", "Admin.internal:8001"), host="admin.internal") == 200


async def test_two_host_headers_are_refused() -> None:
    assert await status(("Host", "localhost"), ("Host", "localhost")) == 403


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
    assert await status(("Host", "127.0.0.1:8001"), ("Origin", origin)) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], 200),
        ([("Origin", "https://router.example.com")], 200),
        ([("Origin", "https://evil.example")], 403),
        ([ROUTER], 403),
    ],
    ids=["alone", "own origin", "foreign origin", "two hosts"],
)
async def test_key_allows_any_host(
    key: AdminKey, more: list[tuple[str, str]], expected: int
) -> None:
    authorization = ("Authorization", f"Bearer {KEY}")
    assert await status(ROUTER, authorization, *more, key=key) == expected
    assert await status(ROUTER, authorization, *more, key=AdminKey()) == 403  # no key is set


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([f"Bearer {KEY}"], 200),
        ([f"bearer  {KEY} "], 200),
        ([basic(KEY)], 200),
        ([basic(KEY, user="")], 200),
        ([], 401),
        ([""], 401),
        ([KEY], 401),
        (["Bearer"], 401),
        ([f"Bearer {KEY}x"], 401),
        ([f"Bearer {KEY[:-1]}"], 401),
        ([f"Bearer {KEY}"] * 2, 401),
        (["", f"Bearer {KEY}"], 401),
        (["Bearer é"], 401),
        ([basic("other")], 401),
        (["Basic !!!"], 401),
        ([f"Digest {KEY}"], 401),
    ],
)
async def test_key_is_required(key: AdminKey, values: list[str], expected: int) -> None:
    answer = await ask(ROUTER, *(("Authorization", value) for value in values), key=key)
    assert answer.status_code == expected
    if expected == 401:
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert KEY not in answer.text


def test_new_key_replaces_the_old_one(key: AdminKey) -> None:
    assert AdminKey().admits(None)
    key.set("another-key-of-20-letters")
    assert not key.admits(f"Bearer {KEY}")
    assert key.admits("Bearer another-key-of-20-letters")
    assert KEY not in repr(vars(key))

"""The key of the admin API."""

from __future__ import annotations

import base64

import httpx
import pytest
from starlette.responses import PlainTextResponse

from proxy.admin.auth import HostCheck
from proxy.admin.key import AdminKey
from proxy.config import parse
from proxy.errors import ConfigError

KEY = "0123456789abcdef-key"


def basic(password: str, user: str = "admin") -> str:
    """Return an Authorization header of a browser."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([f"Bearer {KEY}"], True),
        ([f"bearer  {KEY} "], True),
        ([basic(KEY)], True),
        ([basic(KEY, user="")], True),
        ([], False),
        ([""], False),
        ([KEY], False),
        (["Bearer"], False),
        (["Bearer "], False),
        ([f"Bearer {KEY}x"], False),
        ([f"Bearer {KEY[:-1]}"], False),
        ([f"Bearer {KEY}"] * 2, False),
        (["Bearer é"], False),
        ([basic("other")], False),
        (["Basic !!!"], False),
        ([f"Digest {KEY}"], False),
    ],
)
async def test_key_is_required(headers: list[str], expected: bool) -> None:
    key = AdminKey()
    key.take(KEY)
    app = HostCheck(PlainTextResponse("in"), "127.0.0.1", key)
    all_headers = [(b"Host", b"127.0.0.1"), *((b"Authorization", x.encode()) for x in headers)]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        answer = await client.get("http://127.0.0.1:8001/", headers=all_headers)
    assert answer.status_code == (200 if expected else 401)
    if not expected:
        assert answer.json()["error"]["code"] == "unauthorized"
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert KEY not in answer.text


def test_new_key_replaces_the_old_one() -> None:
    key = AdminKey()
    assert key.admits(None)
    key.take(KEY)
    key.take("another-key-of-20-letters")
    assert not key.admits(f"Bearer {KEY}")
    assert key.admits("Bearer another-key-of-20-letters")
    assert KEY not in repr(vars(key))


def fleet(admin: str) -> str:
    """Return a fleet file."""
    return f"model: m\nworkers: [{{name: a, url: 'http://h:1'}}]\nrouter: {{admin: {admin}}}\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "'::1'", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    parse(fleet(f"{{host: {host}}}"), "f")


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "10.0.0.1", "a.internal"])  # noqa: S104
def test_other_hosts_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.admin\.host: .*router\.admin\.key_file"):
        parse(fleet(f"{{host: {host}}}"), "f")
    parse(fleet(f"{{host: {host}, key_env: ADMIN}}"), "f")


def test_two_sources_of_the_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.admin\.key_env: key_file is given too"):
        parse(fleet("{key_env: A, key_file: b}"), "f")

"""The secrets of the router's own block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.config import AdminConfig, JournalConfig, RouterConfig
from proxy.config.batches import BatchesConfig
from proxy.config.shared import SharedConfig
from proxy.errors import ConfigError
from proxy.setup.secret_files import (
    admin_key,
    database_password,
    journal_key,
    read_secret,
    redis_password,
    secret_problems,
)

KEY = "0123456789abcdef-key"


def router(file: Path) -> RouterConfig:
    """Return a router whose secrets are all in this file."""
    return RouterConfig(
        admin=AdminConfig(key_file=file),
        journal=JournalConfig(key_file=file),
        shared=SharedConfig(url="redis://r", password_file=file),
        batches=BatchesConfig(database="postgresql://r", database_password_file=file),
    )


def test_byte_order_mark_is_no_part_of_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n", encoding="utf-8-sig")
    assert read_secret(admin_key, router(file), "f") == KEY
    assert read_secret(redis_password, router(file), "f") == KEY


def test_secrets_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"\n {KEY}\n")
    assert read_secret(admin_key, router(file), "f") == KEY
    assert read_secret(journal_key, router(file), "f") == KEY.encode()
    assert read_secret(redis_password, router(file), "f") == KEY
    assert not [*secret_problems(router(file))]
    for read in (admin_key, journal_key, redis_password):
        assert read_secret(read, RouterConfig(), "f") is None


def test_admin_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    named = RouterConfig(admin=AdminConfig(key_env="ADMIN"))
    monkeypatch.delenv("ADMIN", raising=False)
    with pytest.raises(ConfigError, match=r"router\.admin\.key_env: ADMIN: not set"):
        read_secret(admin_key, named, "f")
    monkeypatch.setenv("ADMIN", KEY)
    assert read_secret(admin_key, named, "f") == KEY


def test_missing_file_is_reported_for_each_secret(tmp_path: Path) -> None:
    problems = [*secret_problems(router(tmp_path / "none"))]
    assert [problem.path for problem in problems] == [
        "router.admin.key_file", "router.journal.key_file", "router.shared.password_file",
        "router.batches.database_password_file",
    ]  # fmt: skip
    assert all("none': can't be read: " in problem.message for problem in problems)


NO_ADMIN_KEY = r"^f: router\.admin\.key_file: .*16 to 512"


@pytest.mark.parametrize(
    ("secret", "content", "message"),
    [
        (admin_key, b"", NO_ADMIN_KEY),
        (admin_key, b"short", NO_ADMIN_KEY),
        (admin_key, b"two words of the key", NO_ADMIN_KEY),
        (admin_key, b"\xff" * 20, "is not UTF-8 text"),
        (journal_key, b"0123456789abcde\n", "has 15 bytes; a key has 16 or more"),
        (redis_password, b"\n", "is empty; write the password into it"),
        (database_password, b"\n", "is empty; write the password into it"),
    ],
)
def test_invalid_secret_is_refused(
    tmp_path: Path, secret: Any, content: bytes, message: str
) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_secret(secret, router(file), "f")
    assert "two words" not in str(caught.value)


def test_journal_key_is_any_16_bytes(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"\n\xff 0123456789abcdef \n")
    assert read_secret(journal_key, router(file), "f") == b"\xff 0123456789abcdef"

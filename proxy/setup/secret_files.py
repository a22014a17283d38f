"""The secrets that the block `router` refers to: each is in a file or an environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, AnyStr, Final, TypeVar

from proxy.errors import ConfigError, Problem
from proxy.text_files import UnreadableFileError, read_bytes, read_text

if TYPE_CHECKING:
    from proxy.config import RouterConfig

T = TypeVar("T")
ADMIN_KEY: Final = re.compile(r"[!-~]{16,512}")  # shorter keys could be guessed
ADMIN_KEY_FORMAT: Final = (
    "a key has 16 to 512 printable characters without spaces; `openssl rand -hex 32` makes one"
)
MIN_JOURNAL_KEY_BYTES: Final = 16


def read_secret(
    read: Callable[[RouterConfig], T | Problem | None], router: RouterConfig, source: str
) -> T | None:
    """Return a secret; None if none is configured, `ConfigError` if it cannot be read."""
    secret = read(router)
    if isinstance(secret, Problem):
        raise ConfigError(source, [secret])
    return secret


def secret_problems(router: RouterConfig) -> Iterator[Problem]:
    """Yield what is wrong with the configured secrets."""
    for read in (admin_key, journal_key, redis_password, database_password):
        if isinstance(secret := read(router), Problem):
            yield secret


def admin_key(router: RouterConfig) -> str | Problem | None:
    admin = router.admin
    if (file := admin.key_file) is not None:
        where = "router.admin.key_file"
        if isinstance(key := _read(where, file, read_text), Problem):
            return key
    elif (variable := admin.key_env) is not None:
        where = "router.admin.key_env"
        key = os.environ.get(variable, "").strip()
        if not key:
            return Problem(where, f"{variable}: not set; set it to the key")
    else:
        return None
    if ADMIN_KEY.fullmatch(key):
        return key
    return Problem(where, f"contains no valid key; {ADMIN_KEY_FORMAT}")


def journal_key(router: RouterConfig) -> bytes | Problem | None:
    where = "router.journal.key_file"
    if (file := router.journal.key_file) is None:
        return None
    key = _read(where, file, read_bytes)
    if isinstance(key, Problem):
        return key
    if len(key) < MIN_JOURNAL_KEY_BYTES:
        why = f"{str(file)!r}: has {len(key)} bytes; a key has {MIN_JOURNAL_KEY_BYTES} or more; "
        return Problem(where, why + "`openssl rand -hex 32` makes one")
    return key


def redis_password(router: RouterConfig) -> str | Problem | None:
    file = None if router.shared is None else router.shared.password_file
    return _password("router.shared.password_file", file)


def database_password(router: RouterConfig) -> str | Problem | None:
    """Return the password of the database of batches, which is read again at each connection."""
    return _password("router.batches.database_password_file", router.batches.database_password_file)


def _password(where: str, file: Path | None) -> str | Problem | None:
    if file is None:
        return None
    password = _read(where, file, read_text)
    return password or Problem(where, f"{str(file)!r}: is empty; write the password into it")


def _read(where: str, file: Path, read: Callable[[Path], AnyStr]) -> AnyStr | Problem:
    """Return a file's content without space around it, as the engine reads keys."""
    try:
        return read(file).strip()
    except UnreadableFileError as error:
        return Problem(where, f"{str(file)!r}: {error}")

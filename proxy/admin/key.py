"""The admin API's key: stored as a hash, and compared in constant time.

A client sends the key as a bearer token. A browser sends it as a password, with any user name.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256

from proxy.config import AdminConfig, PartialConfig
from proxy.errors import ConfigError, Problem

KEY_PATTERN = re.compile(r"[!-~]{16,512}")  # shorter keys could be guessed
KEY_FORMAT = (
    "a key has 16 to 512 printable characters without spaces; `openssl rand -hex 32` makes one"
)


class AdminKey:
    """The key that requests must carry; `take` can replace it at any time."""

    def __init__(self) -> None:
        self._digest: bytes | None = None

    def take(self, key: str | None) -> None:
        """Set a new key; None turns the check off."""
        self._digest = None if key is None else sha256(key.encode()).digest()

    @property
    def wanted(self) -> bool:
        return self._digest is not None

    def admits(self, authorization: str | None) -> bool:
        """Return True if the Authorization header carries the key, or if no key is set."""
        if self._digest is None:
            return True
        digest = sha256(_key_in(authorization or "")).digest()
        return hmac.compare_digest(digest, self._digest)


def _key_in(authorization: str) -> bytes:
    scheme, _, rest = authorization.partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest.encode("latin-1", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def key_of(admin: AdminConfig, source: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Read the configured key; None if none is configured.

    Raises `ConfigError` if the key cannot be read.
    """
    found = _read(admin, environ)
    if isinstance(found, Problem):
        raise ConfigError(source, [found])
    return found


def key_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Yield what is wrong with the configured key."""
    if draft.router is not None:
        found = _read(draft.router.admin, os.environ)
        if isinstance(found, Problem):
            yield found


def _read(admin: AdminConfig, environ: Mapping[str, str]) -> str | Problem | None:
    if (file := admin.key_file) is not None:
        where = "router.admin.key_file"
        try:
            key = file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            return Problem(where, f"{str(file)!r}: not text; {KEY_FORMAT}")
        except OSError as error:
            message = f"{str(file)!r}: cannot be read: {error.strerror}; check path and permissions"
            return Problem(where, message)
    elif (variable := admin.key_env) is not None:
        where = "router.admin.key_env"
        key = environ.get(variable, "").strip()
        if not key:
            return Problem(where, f"{variable}: not set; set it to the key")
    else:
        return None
    return (
        key
        if KEY_PATTERN.fullmatch(key)
        else Problem(where, f"contains no valid key; {KEY_FORMAT}")
    )

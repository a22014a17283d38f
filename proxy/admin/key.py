"""The key of the admin API: hashed once it is read, and compared in constant time.

It comes as a bearer token, or as the password of a browser that was asked for one, whatever the
user's name.
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

KEY = re.compile(r"[!-~]{16,512}")  # shorter ones could be guessed
FORM = "a key is 16 or more letters, digits and signs, as `openssl rand -hex 32` prints"


class AdminKey:
    """What the admin API compares with; `take` may be called again at any time."""

    def __init__(self) -> None:
        self._digest: bytes | None = None

    def take(self, key: str | None) -> None:
        """Take a new key; None lets everybody in."""
        self._digest = None if key is None else sha256(key.encode()).digest()

    @property
    def wanted(self) -> bool:
        """Whether there is one to be shown."""
        return self._digest is not None

    def admits(self, authorization: str | None) -> bool:
        """Whether whoever says this may come in."""
        if self._digest is None:
            return True
        said = sha256(_key_in(authorization or "")).digest()
        return hmac.compare_digest(said, self._digest)


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
    """Read the key; None where none is asked for. Raises `ConfigError` where it can't be read."""
    found = _read(admin, environ)
    if isinstance(found, Problem):
        raise ConfigError(source, [found])
    return found


def key_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Say what is wrong with the key."""
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
            return Problem(where, f"{str(file)!r}: is not text; {FORM}")
        except OSError as error:
            why = f"{str(file)!r}: can't be read: {error.strerror}; check path and permissions"
            return Problem(where, why)
    elif (variable := admin.key_env) is not None:
        where = "router.admin.key_env"
        key = environ.get(variable, "").strip()
        if not key:
            return Problem(where, f"{variable}: is not set; put the key there")
    else:
        return None
    return key if KEY.fullmatch(key) else Problem(where, f"holds no key; {FORM}")

"""The admin API's key: stored as a hash, and compared in constant time.

A client sends the key as a bearer token. A browser sends it as a password, with any user name.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from hashlib import sha256


class AdminKey:
    def __init__(self) -> None:
        self._digest: bytes | None = None

    def set(self, key: str | None) -> None:
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

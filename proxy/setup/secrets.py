"""The keys that a fleet file refers to, read once for all processes.

A restarted process gets the keys that the others have. Changed files apply at the next reload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.config import FleetConfig
from proxy.discovery import reconcile
from proxy.setup import tenancy
from proxy.setup.secret_files import admin_key, journal_key, read_secret, redis_password


@dataclass(frozen=True, slots=True)
class SecretKeys:
    tenants: Mapping[bytes, str]  # tenant names by key hash
    admin: str | None = field(repr=False)
    # Keys for workers, by pool name.
    pools: Mapping[str, str | None] = field(repr=False)
    journal: bytes | None = field(default=None, repr=False)
    shared: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, config: FleetConfig, source: str) -> SecretKeys:
        """Read the keys; raise `ProxyError` on failure."""
        return cls(
            tenancy.read_keys(config, source),
            read_secret(admin_key, config.router, source),
            reconcile.keys_of(config),
            read_secret(journal_key, config.router, source),
            read_secret(redis_password, config.router, source),
        )

    @property
    def plain(self) -> list[str]:
        """The keys that are not hashes; logs must not contain them."""
        return [key for key in (self.admin, self.shared, *self.pools.values()) if key is not None]

"""The keys that a fleet file only names: read once, from files and variables, for all processes.

A process that is begun again is given what the others have. Files that have changed since are for
the next reload, and one that is gone meanwhile keeps no process from beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.admin import key as admin_key
from proxy.discovery import reconcile
from proxy.setup import tenancy

if TYPE_CHECKING:
    from proxy.config import FleetConfig


@dataclass(frozen=True, slots=True)
class SecretKeys:
    """What was read."""

    tenants: Mapping[bytes, str]  # hashes, and whose each is
    admin: str | None = field(repr=False)
    # Those that workers want, by the name of their pool.
    pools: Mapping[str, str | None] = field(repr=False)

    @classmethod
    def read(cls, config: FleetConfig, source: str) -> SecretKeys:
        """Read them; raises `ProxyError`."""
        return cls(
            tenancy.read_keys(config, source),
            admin_key.key_of(config.router.admin, source),
            reconcile.keys_of(config),
        )

    @property
    def plain(self) -> list[str]:
        """Those that are no hashes, and that no log may have."""
        return [key for key in (self.admin, *self.pools.values()) if key is not None]

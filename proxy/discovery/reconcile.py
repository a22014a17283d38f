"""Decides which changes of a discovered pool's endpoints to believe.

Probes are more reliable than the source of the endpoints:

- The source fails: all workers stay.
- All workers of a pool disappear at once without leaving: they stay while they answer probes.
- No worker of a pool is ready: readiness is ignored. The control plane may have lost its nodes.

How it fails: the last pod disappears without leaving, and a server that answers /health gets its
address. That server stays in the pool until a worker is found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from proxy.config import FleetConfig, PoolConfig
from proxy.discovery.endpoints import Endpoint, Endpoints
from proxy.errors import ProxyError
from proxy.text_files import UnreadableFileError, read_text

logger = logging.getLogger(__name__)


class DiscoveredPool:
    def __init__(self, config: PoolConfig, changed: Callable[[], None]) -> None:
        self.config = config
        self.key: str | None = None  # API key of the workers
        self.known: Endpoints = {}
        self.kept: frozenset[str] = frozenset()  # known, but no longer in the source
        self.why: str | None = None  # why the source does not work
        self.updated_at: float | None = None
        self._changed = changed

    def update(self, endpoints: Endpoints) -> None:
        """Replace the endpoints; keep the old ones if all of them disappeared at once."""
        if self.updated_at is None and not endpoints:
            logger.warning("discovery of pool %s: no worker found yet", self.config.name)
        self.updated_at = time.monotonic()
        if self.why is not None:
            self.why = None
            logger.info("discovery of pool %s: works again", self.config.name)
        stayed = {name: endpoint for name, endpoint in self.known.items() if not endpoint.leaving}
        lost = stayed.keys() - endpoints.keys()
        if lost and all(endpoint.leaving for endpoint in endpoints.values()):
            if not self.kept:
                logger.warning(
                    "discovery of pool %s: all %d workers disappeared without leaving; workers "
                    "that answer probes are kept",
                    self.config.name,
                    len(lost),
                )
            self.kept = frozenset(lost)
            endpoints = {**endpoints, **{name: stayed[name] for name in sorted(lost)}}
        else:
            self.kept = frozenset()
        if endpoints != self.known:
            self.known = dict(endpoints)
            self._changed()

    def fail(self, why: str) -> None:
        """Note that the source does not work; all workers stay."""
        if why != self.why:
            stay = f"{len(self.known)} known workers stay" if self.known else "no worker found yet"
            logger.warning("discovery of pool %s: %s; %s", self.config.name, why, stay)
        self.why = why

    def give_up(self, names: frozenset[str]) -> None:
        """Drop endpoints that were kept."""
        self.kept -= names
        self.known = {name: endpoint for name, endpoint in self.known.items() if name not in names}
        self._changed()

    def members(self) -> Iterator[tuple[Endpoint, bool]]:
        """Yield each endpoint, and whether it takes requests."""
        any_ready = any(endpoint.ready and not endpoint.leaving for endpoint in self.known.values())
        for endpoint in self.known.values():
            yield endpoint, not endpoint.leaving and (endpoint.ready or not any_ready)


def keys_of(config: FleetConfig) -> dict[str, str | None]:
    """Return the API key of each pool's workers by pool name."""
    return {pool.name: key_of(pool) for pool in config.pools}


def key_of(pool: PoolConfig) -> str | None:
    """Return the API key of a pool's workers; raise `ProxyError` for a bad file."""
    if pool.api_key_file is None:
        return pool.api_key
    try:
        key = read_text(pool.api_key_file).strip()
    except UnreadableFileError as error:
        raise ProxyError(
            f"discovery: pool {pool.name}: api_key_file {pool.api_key_file} {error}"
        ) from None
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ProxyError(
            f"discovery: pool {pool.name}: api_key_file {pool.api_key_file} has no valid "
            "key; write one line without spaces"
        )
    return key

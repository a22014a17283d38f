"""One pool of workers that are discovered: who is there, and what is doubted of that.

Whoever tells is less to be trusted than the workers themselves, which the router asks each second:

- Nothing is told (the API server is down, refuses, hangs): everything stays as it is.
- All of a pool's workers are gone at once, none of which was leaving: they stay for as long as
  they answer probes. So an API server that comes back empty does not end the service.
- None of a pool's workers is ready: readiness is not believed. A cluster's control plane that is
  cut off from its nodes says so of healthy workers.

How it fails: a pod that vanished without leaving, as the last of its pool, and whose address was
given to another server that answers /health with 200, is kept until another worker is found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from proxy.config import FleetConfig, PoolConfig
from proxy.discovery.endpoints import Endpoint, Endpoints
from proxy.errors import ProxyError

logger = logging.getLogger(__name__)


class DiscoveredPool:
    """What is known of one pool."""

    def __init__(self, config: PoolConfig, changed: Callable[[], None]) -> None:
        self.config = config
        self.key: str | None = None  # that its workers want
        self.known: Endpoints = {}
        self.kept: frozenset[str] = frozenset()  # of the known: those that nobody tells of now
        self.why: str | None = None  # nothing is told at present
        self.heard_at: float | None = None
        self._changed = changed

    def told(self, endpoints: Endpoints) -> None:
        """Take all endpoints, as they are now."""
        if self.heard_at is None and not endpoints:
            logger.warning("discovery of pool %s: nobody is there yet", self.config.name)
        self.heard_at = time.monotonic()
        if self.why is not None:
            self.why = None
            logger.info("discovery of pool %s: works again", self.config.name)
        stayed = {name: each for name, each in self.known.items() if not each.leaving}
        lost = stayed.keys() - endpoints.keys()
        if lost and all(each.leaving for each in endpoints.values()):
            if not self.kept:
                logger.warning(
                    "discovery of pool %s: nobody is left of %d workers, none of which was seen "
                    "leaving; those that answer are kept",
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

    def trouble(self, why: str) -> None:
        """Hear that nothing new can be told."""
        if why != self.why:
            stay = f"the {len(self.known)} workers known stay" if self.known else "no worker yet"
            logger.warning("discovery of pool %s: %s; %s", self.config.name, why, stay)
        self.why = why

    def give_up(self, names: frozenset[str]) -> None:
        """No longer keep some."""
        self.kept -= names
        self.known = {name: each for name, each in self.known.items() if name not in names}
        self._changed()

    def members(self) -> Iterator[tuple[Endpoint, bool]]:
        """Name each worker, and say whether it may be given anything."""
        somebody = any(each.ready and not each.leaving for each in self.known.values())
        for each in self.known.values():
            yield each, not each.leaving and (each.ready or not somebody)


def keys_of(config: FleetConfig) -> dict[str, str | None]:
    """Return the key that each pool's workers want, by the pool's name."""
    pools = () if config.discovery is None else config.discovery.pools
    return {pool.name: key_of(pool) for pool in pools}


def key_of(pool: PoolConfig) -> str | None:
    """Return the key that a pool's workers want."""
    if pool.api_key_file is None:
        return pool.api_key
    try:
        key = pool.api_key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise ProxyError(
            f"discovery: pool {pool.name}: api_key_file {pool.api_key_file} can't be read "
            f"({reason}); correct it"
        ) from None
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ProxyError(
            f"discovery: pool {pool.name}: api_key_file {pool.api_key_file} holds no key; it is "
            "one line without spaces"
        )
    return key

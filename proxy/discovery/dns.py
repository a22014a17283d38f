"""Discovers workers by a DNS name with one address per worker, as of a headless Service."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from dataclasses import replace

from proxy.config import PoolConfig
from proxy.discovery.endpoints import (
    DEFAULT_PORT,
    Endpoint,
    Endpoints,
    by_address,
    name_of,
)
from proxy.discovery.reconcile import DiscoveredPool
from proxy.net.resolver import NAME_NOT_FOUND, RESOLVER

# A DNS response may omit a worker by accident. A worker gets no new requests after one miss, and is
# removed after this number of consecutive misses.
MAX_MISSES = 3


class DnsSource:
    def __init__(self, every_s: float, pool: PoolConfig) -> None:
        self._every_s = every_s
        self._pool = pool
        self._known: dict[str, Endpoint] = {}
        self._missed: Counter[str] = Counter()

    async def run(self, listener: DiscoveredPool) -> None:
        while True:
            try:
                listener.update(self._seen(await self._look_up()))
            except OSError as error:
                listener.fail(f"{self._pool.dns} can't be looked up: {error}")
            await asyncio.sleep(self._every_s * random.uniform(0.9, 1.1))

    async def _look_up(self) -> set[str]:
        """Return the addresses of one family, because a worker may have both."""
        try:
            addresses = await RESOLVER.look_up(self._pool.dns or "")
        except socket.gaierror as error:
            if error.errno in NAME_NOT_FOUND:
                return set()
            raise
        return {host for host in addresses if ":" not in host} or set(addresses)

    def _seen(self, hosts: set[str]) -> Endpoints:
        port = self._pool.port if isinstance(self._pool.port, int) else DEFAULT_PORT
        endpoints = {}
        for host in hosts:
            name = name_of(by_address(self._pool.name, host))
            endpoints[name] = Endpoint(name, host, port, scheme=self._pool.scheme)
            del self._missed[name]
        for name, endpoint in self._known.items():
            if name not in endpoints:
                self._missed[name] += 1
                if self._missed[name] < MAX_MISSES:
                    endpoints[name] = replace(endpoint, ready=False)
                else:
                    del self._missed[name]
        self._known = dict(sorted(endpoints.items()))
        return self._known

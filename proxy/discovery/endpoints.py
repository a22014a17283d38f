"""Endpoints of discovered workers, and how to read them from EndpointSlices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.config import PoolConfig

DEFAULT_PORT = 8000  # vLLM's own
JOURNAL_PORT = "journal"  # the name of a port
MAX_NAME_CHARS = 64
IPV4_FIRST = {"IPv4": 0, "IPv6": 1}


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str
    host: str
    port: int
    ready: bool = True
    leaving: bool = False
    scheme: str = "http"
    journal_port: int | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self._host}:{self.port}"

    @property
    def journal(self) -> tuple[str, ...]:
        """The address of the worker's journal, if it has one."""
        return () if self.journal_port is None else (f"tcp://{self._host}:{self.journal_port}",)

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


Endpoints = Mapping[str, Endpoint]  # by name


def read_slices(slices: Iterable[Mapping[str, Any]], pool: PoolConfig) -> Endpoints:
    """Return the endpoints of a pool's EndpointSlices.

    A worker can be in two slices, while it moves or if it has IPv4 and IPv6 addresses. It is
    returned once, with its IPv4 address.
    """
    endpoints: dict[str, tuple[int, Endpoint]] = {}
    for item in slices:
        family = IPV4_FIRST.get(str(item.get("addressType")), len(IPV4_FIRST))
        for endpoint in _endpoints(item, pool):
            other = endpoints.get(endpoint.name)
            endpoints[endpoint.name] = (
                (family, endpoint) if other is None else min(other, (family, endpoint), key=_order)
            )
    return {name: endpoint for name, (_, endpoint) in sorted(endpoints.items())}


def _order(numbered: tuple[int, Endpoint]) -> tuple[bool, bool, int]:
    """Order endpoints of one name: a restarted pod comes before the old pod."""
    family, endpoint = numbered
    return endpoint.leaving, not endpoint.ready, family


def _endpoints(item: Mapping[str, Any], pool: PoolConfig) -> Iterator[Endpoint]:
    numbers = {str(port.get("name") or ""): port.get("port") for port in item.get("ports") or []}
    port, journal_port = _port(numbers, pool.port), _port(numbers, JOURNAL_PORT)
    if port is None:
        return
    for entry in item.get("endpoints") or []:
        # Kubernetes: consumers should use the first address only.
        if not (addresses := entry.get("addresses")):
            continue
        host = str(addresses[0])
        target = entry.get("targetRef") or {}
        conditions = entry.get("conditions") or {}
        yield Endpoint(
            name_of(str(target["name"]) if target.get("name") else by_address(pool.name, host)),
            host,
            port,
            ready=conditions.get("ready") is not False,  # missing means ready
            leaving=conditions.get("terminating") is True,
            scheme=pool.scheme,
            journal_port=journal_port,
        )


def _port(numbers: Mapping[str, object], wanted: int | str | None) -> int | None:
    if isinstance(wanted, int):
        return wanted
    number: object
    if wanted is None:
        others = [number for name, number in numbers.items() if name != JOURNAL_PORT]
        (number,) = others if len(others) == 1 else (DEFAULT_PORT,)
    else:
        number = numbers.get(wanted)
    return number if isinstance(number, int) else None


def by_address(pool: str, host: str) -> str:
    return f"{pool}-{host.replace(':', '-')}"


def name_of(name: str) -> str:
    """Return a pod's name, shortened to a unique worker name."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_CHARS - len(digest) - 1]}-{digest}"

"""Where workers were found, and how EndpointSlices tell it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.config import PoolConfig

DEFAULT_PORT = 8000  # vLLM's own
LONGEST_NAME = 64
IPV4_FIRST = {"IPv4": 0, "IPv6": 1}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker that somebody says is there."""

    name: str
    host: str
    port: int
    ready: bool = True
    leaving: bool = False
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


Endpoints = Mapping[str, Endpoint]  # by name


class EndpointListener(Protocol):
    """Who is told."""

    def told(self, endpoints: Endpoints) -> None:
        """Take all of a pool's endpoints, as they are now."""

    def trouble(self, why: str) -> None:
        """Hear that nothing new can be told at the moment."""


def read_slices(slices: Iterable[Mapping[str, Any]], pool: PoolConfig) -> Endpoints:
    """Return the workers of a pool's EndpointSlices.

    One that moves between slices is in two of them for a moment, and one with addresses of both
    families is so for good: it is taken once, by its IPv4 address.
    """
    found: dict[str, tuple[int, Endpoint]] = {}
    for each in slices:
        family = IPV4_FIRST.get(str(each.get("addressType")), len(IPV4_FIRST))
        for endpoint in _endpoints(each, pool):
            other = found.get(endpoint.name)
            found[endpoint.name] = (
                (family, endpoint) if other is None else min(other, (family, endpoint), key=_worth)
            )
    return {name: endpoint for name, (_, endpoint) in sorted(found.items())}


def _worth(found: tuple[int, Endpoint]) -> tuple[bool, bool, int]:
    """Order two of one name: a pod that was started anew is preferred to the one that leaves."""
    family, endpoint = found
    return endpoint.leaving, not endpoint.ready, family


def _endpoints(each: Mapping[str, Any], pool: PoolConfig) -> Iterator[Endpoint]:
    port = _port(each.get("ports") or [], pool.port)
    if port is None:
        return
    for given in each.get("endpoints") or []:
        # "Consumers should use the first": more are for headless Services of old.
        if not (addresses := given.get("addresses")):
            continue
        host = str(addresses[0])
        target = given.get("targetRef") or {}
        conditions = given.get("conditions") or {}
        yield Endpoint(
            name_of(str(target["name"]) if target.get("name") else by_address(pool.name, host)),
            host,
            port,
            ready=conditions.get("ready") is not False,  # not said means yes
            leaving=conditions.get("terminating") is True,
            scheme=pool.scheme,
        )


def _port(ports: list[Mapping[str, Any]], wanted: int | str | None) -> int | None:
    if isinstance(wanted, int):
        return wanted
    numbers = {str(port.get("name") or ""): port.get("port") for port in ports}
    if wanted is None:
        (number,) = numbers.values() if len(numbers) == 1 else (DEFAULT_PORT,)
    else:
        number = numbers.get(wanted)
    return number if isinstance(number, int) else None


def by_address(pool: str, host: str) -> str:
    """Name a worker that nobody named."""
    return f"{pool}-{host.replace(':', '-')}"


def name_of(name: str) -> str:
    """Shorten a pod's name to what a worker's may have, so that it still is nobody else's."""
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - len(digest) - 1]}-{digest}"

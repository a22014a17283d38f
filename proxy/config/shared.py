"""The block `router.shared`: state that routers on several hosts share."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from proxy.config.types import Block, FilePath, Name

SCHEMES = "redis", "rediss", "unix"


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{error}; write it as redis://host:6379/0") from None
    if parts.scheme not in SCHEMES or not (parts.path if parts.scheme == "unix" else parts.netloc):
        raise ValueError(
            "write it as redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///run/redis.sock"
        )
    if parts.password is not None:
        raise ValueError(
            "a password would be visible in the printed configuration; give password_file instead"
        )
    return url


class SharedConfig(Block):
    """A Redis or Valkey server through which router replicas share their state."""

    url: Annotated[str, AfterValidator(_url)]
    """URL of the server, as in redis://host:6379/0. A user name may be in it; rediss:// uses
    TLS, unix:///path a socket"""
    cluster: bool = False
    """The server is a node of a Redis cluster"""
    password_file: FilePath | None = None
    """File with the server's password; read at the start"""
    ca_file: FilePath | None = None
    """Certificates of the authorities that the server's certificate is checked against, with
    rediss://; the system's if not given"""
    namespace: Name = "vllm-sched"
    """Name of the fleet on the server. All replicas of a router have the same; other fleets on
    the same server have another"""
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of routers of the fleet; with an autoscaler, its minimum. A router without the
    server takes one of so many parts of each limit; less if it saw more routers"""
    timeout_s: Annotated[float, Field(gt=0, le=5)] = 0.5
    """Seconds for an answer of the server. Then a tenant's limits are decided without it, with
    this replica's part of each limit"""

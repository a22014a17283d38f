"""The block `router.shared`: state that routers on several hosts share."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, Field

from proxy.config.types import Block, FilePath, Name

EXAMPLE = "redis://host:6379/0"
SCHEMES = "redis://", "rediss://", "unix://"  # redis-py takes no capitals
# Options that the URL may have, as redis-py names them.
DATABASE = "db"
TLS_OPTIONS = "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"
VISIBLE = "a password would be visible in the printed configuration; give password_file instead"


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{error}; write it as {EXAMPLE}") from None
    if not url.startswith(SCHEMES) or not (parts.path if parts.scheme == "unix" else parts.netloc):
        raise ValueError(
            "write it as redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///run/redis.sock"
        )
    options = parse_qs(parts.query, keep_blank_values=True)
    if parts.password is not None or "password" in options:
        raise ValueError(VISIBLE)
    valid = (DATABASE, *TLS_OPTIONS) if parts.scheme == "rediss" else (DATABASE,)
    if unknown := [name for name in options if name not in valid]:
        raise ValueError(f"{unknown[0]} is no option here; valid: {', '.join(valid)}")
    database_of(url)
    return url


def database_of(url: str) -> int:
    """Return the number of the database that a URL names; raise `ValueError` without a number."""
    parts = urlsplit(url)
    path = "" if parts.scheme == "unix" else parts.path.removeprefix("/")
    named = parse_qs(parts.query).get(DATABASE, [])  # before the path's, as redis-py reads them
    for word in (path, *named):
        if word and not (word.isascii() and word.isdigit()):
            raise ValueError(f"{word[:20]!r} is no number of a database; write it as {EXAMPLE}")
    return int((*named, path)[0] or 0)


class SharedConfig(Block):
    """A Redis or Valkey server through which router replicas share their state."""

    url: Annotated[str, AfterValidator(_url)]
    """URL of the server, as in redis://host:6379/0. A user name may be in it; rediss:// uses
    TLS, unix:///path?db=0 a socket. rediss:// takes the options ssl_certfile, ssl_keyfile,
    ssl_cert_reqs and ssl_check_hostname of redis-py"""
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

"""The Redis server of `router.shared`: connections, and the channel between replicas."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from proxy.errors import ProxyError

if TYPE_CHECKING:
    from proxy.config.shared import SharedConfig

PATH = "router.shared"
VERSION = 1  # replicas of another version use another channel


class ReplicaChannel(Protocol):
    """What every replica publishes, all replicas receive, the sender too."""

    async def publish(self, message: bytes) -> None: ...

    async def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message; None if none comes in time."""


def check(settings: SharedConfig) -> None:
    """Raise `ProxyError` if the settings cannot be used here at all."""
    client(settings, None)
    if (file := settings.ca_file) is not None:
        try:
            ssl.create_default_context(cafile=str(file))
        except (OSError, ssl.SSLError) as error:
            raise ProxyError(f"{PATH}.ca_file {str(file)!r}: cannot be used: {error}") from None


def client(settings: SharedConfig, password: str | None) -> Any:
    """Return a client, which connects when it is used; raise `ProxyError` without the library."""
    try:
        from redis import asyncio as redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ProxyError(
            f"{PATH} needs the redis package; install it with: pip install 'vllm-sched[redis]'"
        ) from None
    timeout = settings.timeout_s
    options: dict[str, Any] = {
        "password": password,
        "socket_connect_timeout": timeout,
        "socket_timeout": timeout,
    }
    if settings.ca_file is not None:
        options["ssl_ca_certs"] = str(settings.ca_file)
    if settings.url.startswith("rediss://"):
        options["ssl_min_version"] = ssl.TLSVersion.TLSv1_2
    if settings.cluster:
        return redis.RedisCluster.from_url(settings.url, **options)
    # Each caller has its own way to go on without the server.
    return redis.Redis.from_url(settings.url, retry=Retry(NoBackoff(), 0), **options)


def server_errors() -> tuple[type[Exception], ...]:
    """Return the errors that mean that the server cannot be used now."""
    from redis.exceptions import RedisError

    return RedisError, OSError, TimeoutError


class RedisChannel:
    """A channel of the server."""

    def __init__(self, connection: Any, subscription: Any, name: str) -> None:
        self._connection = connection
        self._subscription = subscription
        self._name = name

    async def publish(self, message: bytes) -> None:
        await self._connection.publish(self._name, message)

    async def receive(self, timeout_s: float) -> bytes | None:
        found = await self._subscription.get_message(
            ignore_subscribe_messages=True, timeout=timeout_s
        )
        return None if found is None else found["data"]


@asynccontextmanager
async def open_channel(
    settings: SharedConfig, password: str | None
) -> AsyncIterator[ReplicaChannel]:
    """Connect to the channel of a fleet."""
    connection = client(settings, password)
    try:
        if settings.cluster:
            await connection.initialize()  # a subscription alone does not
        subscription = connection.pubsub()
        name = f"{settings.namespace}:{VERSION}:replicas"
        await subscription.subscribe(name)
        yield RedisChannel(connection, subscription, name)
        await subscription.aclose()
    finally:
        await connection.aclose()

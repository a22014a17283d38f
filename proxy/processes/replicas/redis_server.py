"""The Redis server of `router.shared`: connections, and the channel between replicas."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from proxy.config.shared import SharedConfig
from proxy.errors import ProxyError

PATH = "router.shared"
VERSION = 2  # replicas of another version use another channel
CHECK_INTERVAL_S = 1.0
# Replicas publish at the same moments. After a pause their messages are read together.
READ_PAUSE_S = 0.004
READ_ONLY = "READONLY"
# What servers reply to a client that gives no password.
NO_PASSWORD = "HELLO must be called with the client already authenticated", "NOAUTH"


def check(settings: SharedConfig) -> None:
    """Raise `ProxyError` if the settings cannot be used here at all."""
    server = client(settings, password=None)
    if not settings.cluster:
        unusable = server_errors()
        try:
            server.connection_pool.make_connection()  # connects later
        except unusable as error:
            raise ProxyError(f"{PATH}.url: {error}") from None
    if (file := settings.ca_file) is not None:
        try:
            ssl.create_default_context(cafile=str(file))
        except (OSError, ssl.SSLError) as error:
            raise ProxyError(f"{PATH}.ca_file {str(file)!r}: cannot be used: {error}") from None


def client(settings: SharedConfig, password: str | None) -> Any:
    """Return a client, which connects when it is used; raise `ProxyError` without the library."""
    try:
        import hiredis  # noqa: F401
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
        "protocol": 3,  # with pushed messages
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
    from hiredis import HiredisError
    from redis.exceptions import RedisClusterException, RedisError

    return HiredisError, RedisError, RedisClusterException, OSError, TimeoutError


def describe(error: Exception) -> str:
    """Return what an error means for the operator."""
    text = str(error).rstrip(".")
    if text.startswith(NO_PASSWORD):
        return f"the server needs a password; give {PATH}.password_file"
    if isinstance(error, TimeoutError) and not text:
        return f"no answer within {PATH}.timeout_s"
    return text or type(error).__name__


class RedisConnection(asyncio.Protocol):
    """A connection that redis-py has opened, without its cost per command."""

    def __init__(self, opened: Any, received: Callable[[bytes], None]) -> None:
        import hiredis

        self.error: Exception | None = None
        self._opened = opened
        self._received = received
        self._transport = opened._writer.transport
        self._pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command
        self._reader = hiredis.Reader()
        self._errors, self._pushes = hiredis.ReplyError, hiredis.PushNotification
        self._waiting: deque[Callable[[Any], None]] = deque()
        self._transport.set_protocol(self)

    def send(self, *words: Any, replied: Callable[[Any], None] | None = None) -> None:
        """Send a command; an error closes the connection, or `replied` gets it."""
        self._waiting.append(replied or self._check)
        self._transport.write(self._pack(words))

    async def ask(self, *words: Any) -> Any:
        if self.error is not None:
            raise self.error
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def replied(reply: Any) -> None:
            if result.done():
                return
            if isinstance(reply, Exception):
                result.set_exception(reply)
            else:
                result.set_result(reply)

        self.send(*words, replied=replied)
        return await result

    def pause_reading(self, pause_s: float) -> None:
        self._transport.pause_reading()
        asyncio.get_running_loop().call_later(pause_s, self._resume_reading)

    def _resume_reading(self) -> None:
        if self.error is None:
            self._transport.resume_reading()

    def _check(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            self.fail(reply)

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self._transport.close()
            # Otherwise redis-py warns.
            self._opened._reader = self._opened._writer = None
            while self._waiting:
                self._waiting.popleft()(error)

    def close(self) -> None:
        self.fail(ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        while (reply := reader.gets()) is not False:
            if not isinstance(reply, self._pushes) or reply[0] == b"subscribe":
                self._waiting.popleft()(reply) if self._waiting else self._check(reply)
            elif reply[0] == b"message":
                self._received(reply[2])

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(error or ConnectionError("the server closed the connection"))


def _ignore(message: bytes) -> None:
    pass


async def connect(
    settings: SharedConfig,
    password: str | None,
    key: str,
    received: Callable[[bytes], None] = _ignore,
) -> RedisConnection:
    factory = client(settings, password)
    try:
        if settings.cluster:
            await factory.initialize()
            node = factory.get_node_from_key(key)
            opened = node.connection_class(**node.connection_kwargs)
        else:
            opened = factory.connection_pool.make_connection()
        await opened.connect()
        return RedisConnection(opened, received)
    finally:
        await factory.aclose()


class RedisChannel:
    """A publish/subscribe channel. Each message reaches every replica, including its sender."""

    def __init__(self, connection: RedisConnection, name: str, settings: SharedConfig) -> None:
        self._connection = connection
        self._name = name
        self._key = f"{{{settings.namespace}}}:primary"
        self._checks = not settings.cluster
        self._check_at = 0.0

    @property
    def error(self) -> Exception | None:
        return self._connection.error

    async def open(self) -> None:
        """Subscribe; raise an error if that cannot be done."""
        await self._connection.ask("SUBSCRIBE", self._name)
        self._check()
        await self.drain()

    def publish(self, message: bytes) -> None:
        self._connection.send("PUBLISH", self._name, message)
        self._check()
        if self._connection.error is None:
            self._connection.pause_reading(READ_PAUSE_S)

    async def drain(self) -> None:
        """Wait until the server has what was published."""
        await self._connection.ask("PING")

    def _check(self) -> None:
        """Write nothing, to notice a server that has become a replica."""
        if self._checks and (now := asyncio.get_running_loop().time()) >= self._check_at:
            self._check_at = now + CHECK_INTERVAL_S
            self._connection.send("HDEL", self._key, "none", replied=self._checked)

    def _checked(self, reply: Any) -> None:
        if isinstance(reply, Exception) and str(reply).startswith(READ_ONLY):
            self._connection.fail(reply)


@asynccontextmanager
async def open_channel(
    settings: SharedConfig, password: str | None, received: Callable[[bytes], None]
) -> AsyncIterator[RedisChannel]:
    name = f"{settings.namespace}:{VERSION}:replicas"
    async with asyncio.timeout(settings.timeout_s):
        connection = await connect(settings, password, name, received)
    try:
        channel = RedisChannel(connection, name, settings)
        async with asyncio.timeout(settings.timeout_s):
            await channel.open()
        yield channel
    finally:
        connection.close()

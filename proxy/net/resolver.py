"""Name resolution and connections, in which a slow name does not delay other names.

Event loops have few threads for look-ups, so each look-up has its own.

- Results are cached for `CACHE_TTL_S`. A failed connection expires the cached result.
- If a new look-up is slow or fails, the cached result is used, unless the name no longer exists.

A connection to the next address starts after `NEXT_ADDRESS_DELAY_S`; the first to succeed is used
(RFC 8305).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

CACHE_TTL_S = 1.0
REFRESH_WAIT_S = 0.25  # for a new look-up, before the expired result is used
NEXT_ADDRESS_DELAY_S = 0.25
MAX_THREADS = 64
MAX_CACHED_NAMES = 4096
NAME_NOT_FOUND = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

Addresses = tuple[str, ...]
P = TypeVar("P", bound=asyncio.BaseProtocol)


class NoAddressAnswersError(OSError):
    """No address accepted a connection; `errors` has the reasons."""

    def __init__(self, errors: Sequence[OSError]) -> None:
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = tuple(errors)


class CachedLookup(NamedTuple):
    """The addresses of a name, or the error of its look-up, and when the entry expires."""

    outcome: Addresses | BaseException
    until: float

    def result(self) -> Addresses:
        if isinstance(self.outcome, BaseException):
            raise self.outcome.with_traceback(None)  # a traceback would grow each time
        return self.outcome


class PendingLookup(NamedTuple):
    began: float
    addresses: Future[Addresses]


def resolve(host: str) -> Addresses:
    """Return the addresses of a name in the system's order; block until they are known."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(_address_text(entry[4]) for entry in addresses))


def _address_text(address: tuple[Any, ...]) -> str:
    host = str(address[0])
    scope = address[3] if len(address) > 3 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host


class Resolver:
    def __init__(self, ask: Callable[[str], Addresses] = resolve) -> None:
        self._ask = ask
        self._cached: dict[str, CachedLookup] = {}
        self._under_way: dict[str, PendingLookup] = {}
        self._lock = threading.Lock()  # for the two below
        self._waiting: deque[tuple[str, Future[Addresses]]] = deque()
        self._threads = 0

    async def find(self, host: str) -> Addresses:
        """Return cached or new addresses; raise `OSError` or `UnicodeError`."""
        if is_address(host):
            return (host,)
        cached, now = self._cached.get(host), time.monotonic()
        if cached is None:
            return await self.look_up(host)
        if now < cached.until:
            return cached.result()
        look_up = self._start_look_up(host, now)
        try:
            async with asyncio.timeout(max(look_up.began + REFRESH_WAIT_S - now, 0.0)):
                return await asyncio.wrap_future(look_up.addresses)
        except OSError as error:  # or its subclass `TimeoutError`
            if _is_final(error):
                raise
        return cached.result()

    async def look_up(self, host: str) -> Addresses:
        """Return the addresses from a new look-up."""
        return await asyncio.wrap_future(self._start_look_up(host, time.monotonic()).addresses)

    def expire(self, host: str) -> None:
        """Expire cached addresses after a failed connection."""
        cached = self._cached.get(host)
        if cached is not None:
            self._cached[host] = cached._replace(until=0.0)

    def _start_look_up(self, host: str, now: float) -> PendingLookup:
        if (under_way := self._under_way.get(host)) is not None:
            return under_way
        result: Future[Addresses] = Future()
        result.set_running_or_notify_cancel()  # waiters can't cancel it
        look_up = self._under_way[host] = PendingLookup(now, result)
        result.add_done_callback(lambda result: self._cache_result(host, result))
        with self._lock:
            self._waiting.append((host, result))
            if self._threads >= MAX_THREADS:
                return look_up
            self._threads += 1
        try:
            # Not an executor's thread: the router must be able to exit during a look-up.
            threading.Thread(target=self._run_look_ups, name="look-up", daemon=True).start()
        except RuntimeError:
            self._give_up_thread()
        return look_up

    def _give_up_thread(self) -> None:
        with self._lock:
            self._threads -= 1
            remaining = [] if self._threads else list(self._waiting)
            if remaining:
                self._waiting.clear()
        for _, result in remaining:
            result.set_exception(OSError(errno.ENOMEM, "no thread for a look-up"))

    def _run_look_ups(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                host, result = self._waiting.popleft()
            try:
                addresses = self._ask(host)
            except Exception as error:  # `UnicodeError` for an invalid name
                result.set_exception(error)
            else:
                result.set_result(addresses)

    def _cache_result(self, host: str, result: Future[Addresses]) -> None:
        """Cache a result. Runs in the look-up's thread, so a cancelled waiter does not lose it."""
        error, cached = result.exception(), self._cached.get(host)
        if cached is None and len(self._cached) >= MAX_CACHED_NAMES:
            self._cached.clear()
        if error is None:
            self._cached[host] = CachedLookup(result.result(), time.monotonic() + CACHE_TTL_S)
        elif cached is None or _is_final(error) or isinstance(cached.outcome, BaseException):
            self._cached[host] = CachedLookup(error, 0.0)
        self._under_way.pop(host, None)


RESOLVER = Resolver()


async def connect(
    protocol: Callable[[], P],
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    handshake_s: float | None = None,
) -> tuple[asyncio.BaseTransport, P]:
    """Connect to the first address of a host that accepts; return transport and protocol.

    Raises `OSError`, or `UnicodeError` for an invalid name.
    """
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl": tls, "server_hostname": host, "ssl_handshake_timeout": handshake_s}
    loop = asyncio.get_running_loop()
    errors: list[OSError] = []
    remaining = deque(await RESOLVER.find(host))
    while remaining:
        try:
            if len(remaining) == 1:
                return await loop.create_connection(protocol, remaining.popleft(), port, **options)
            if (raw := await _first_connected(remaining, port, errors)) is not None:
                return await loop.create_connection(protocol, sock=raw, **options)
        except ssl.SSLError:
            raise  # the address accepted the connection
        except OSError as error:
            errors.append(error)
        except asyncio.CancelledError:  # the caller's timeout
            RESOLVER.expire(host)
            raise
    RESOLVER.expire(host)
    raise errors[0] if len(errors) == 1 else NoAddressAnswersError(errors)


async def _first_connected(
    remaining: deque[str], port: int, errors: list[OSError]
) -> socket.socket | None:
    """Return a socket to the first address that accepts; failures go to `errors`."""
    loop = asyncio.get_running_loop()
    attempts: dict[asyncio.Task[socket.socket], str] = {}
    try:
        while remaining or attempts:
            if remaining:
                address = remaining.popleft()
                attempts[loop.create_task(_connect_to(address, port))] = address
            done, _ = await asyncio.wait(
                attempts,
                timeout=NEXT_ADDRESS_DELAY_S if remaining else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for attempt in done:
                del attempts[attempt]
                try:
                    return attempt.result()
                except OSError as error:
                    errors.append(error)
    finally:
        for attempt, address in attempts.items():
            attempt.cancel()
            attempt.add_done_callback(_close)
            remaining.append(address)  # tried again if the TLS handshake fails
    return None


async def _connect_to(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    raw = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        raw.setblocking(False)
        # The scope must be in the address: uvloop ignores a tuple's fourth item.
        await asyncio.get_running_loop().sock_connect(raw, (address, port))
    except BaseException:
        raw.close()
        raise
    return raw


def _close(attempt: asyncio.Task[socket.socket]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_final(error: BaseException) -> bool:
    return isinstance(error, UnicodeError) or (
        isinstance(error, socket.gaierror) and error.errno in NAME_NOT_FOUND
    )

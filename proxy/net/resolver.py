"""Connections by name, of which none waits for another's name to be looked up.

An event loop has a few threads for all look-ups, uvloop two: a few workers that are gone, for whose
names the resolver takes ten seconds, would keep every other worker from being found. So each name
has a thread of its own, one at a time, whoever asks. Where that takes long or fails, what was found
before has to do, unless the answer is that there is no such name; and where nothing was found, the
last failure is one again. What is older than a moment is looked up anew, and so is where nobody
took a connection: a worker that was started again may be elsewhere.

Of several addresses one that nobody answers at takes no time from the others: after a moment the
next one is tried beside it, and whichever answers first is it (RFC 8305).
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

FRESH_S = 1.0  # what was found is good for
WAIT_S = 0.25  # for a look-up, where something was found before
HEAD_START_S = 0.25  # of an address, before the next one is tried beside it
MOST_THREADS = 64
MOST_KNOWN = 4096
NOBODY = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

Addresses = tuple[str, ...]
P = TypeVar("P", bound=asyncio.BaseProtocol)


class NoAddressAnswersError(OSError):
    """None of a name's addresses led anywhere, for one reason each."""

    def __init__(self, errors: Sequence[OSError]) -> None:
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = tuple(errors)


class CachedLookup(NamedTuple):
    """What a name stood for, or why it can't be known, and until when nobody asks again."""

    found: Addresses | BaseException
    until: float

    def told(self) -> Addresses:
        """Return the addresses, or raise."""
        if isinstance(self.found, BaseException):
            raise self.found.with_traceback(None)  # or it would grow each time
        return self.found


class PendingLookup(NamedTuple):
    """One that is under way."""

    began: float
    answer: Future[Addresses]


def ask_system(host: str) -> Addresses:
    """Look a name up, as long as that takes; in the system's order."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(_written(each[4]) for each in found))


def _written(address: tuple[Any, ...]) -> str:
    host = str(address[0])
    scope = address[3] if len(address) > 3 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host


class Resolver:
    """Names and what they stand for."""

    def __init__(self, ask: Callable[[str], Addresses] = ask_system) -> None:
        self._ask = ask
        self._known: dict[str, CachedLookup] = {}
        self._under_way: dict[str, PendingLookup] = {}
        self._lock = threading.Lock()  # for the two below
        self._waiting: deque[tuple[str, Future[Addresses]]] = deque()
        self._threads = 0

    async def find(self, host: str) -> Addresses:
        """Return where a name is now, or was; raises an `OSError` or a `UnicodeError`."""
        if _is_address(host):
            return (host,)
        known, now = self._known.get(host), time.monotonic()
        if known is None:
            return await self.look_up(host)
        if now < known.until:
            return known.told()
        look_up = self._begin(host, now)
        try:
            async with asyncio.timeout(max(look_up.began + WAIT_S - now, 0.0)):
                return await asyncio.wrap_future(look_up.answer)
        except OSError as error:  # a `TimeoutError`, too
            if _is_final(error):
                raise
        return known.told()

    async def look_up(self, host: str) -> Addresses:
        """Look a name up, whatever is known of it."""
        return await asyncio.wrap_future(self._begin(host, time.monotonic()).answer)

    def doubt(self, host: str) -> None:
        """Note that no connection could be had there: to be looked up before the next."""
        known = self._known.get(host)
        if known is not None:
            self._known[host] = known._replace(until=0.0)

    def _begin(self, host: str, now: float) -> PendingLookup:
        """Return the look-up that is under way, a new one if there is none."""
        found = self._under_way.get(host)
        if found is not None:
            return found
        answer: Future[Addresses] = Future()
        answer.set_running_or_notify_cancel()  # who waits no more ends it for nobody else
        look_up = self._under_way[host] = PendingLookup(now, answer)
        answer.add_done_callback(lambda answer: self._learn(host, answer))
        with self._lock:
            self._waiting.append((host, answer))
            if self._threads >= MOST_THREADS:
                return look_up
            self._threads += 1
        try:
            # Not an executor's: the router's end waits for no look-up.
            threading.Thread(target=self._work, name="look-up", daemon=True).start()
        except RuntimeError:
            self._without_thread()
        return look_up

    def _without_thread(self) -> None:
        with self._lock:
            self._threads -= 1
            left = [] if self._threads else list(self._waiting)
            if left:
                self._waiting.clear()
        for _, answer in left:
            answer.set_exception(OSError(errno.ENOMEM, "no thread for a look-up"))

    def _work(self) -> None:
        """Look up what waits, in a thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                host, answer = self._waiting.popleft()
            try:
                found = self._ask(host)
            except Exception as error:  # a host that can be no name is a `UnicodeError`
                answer.set_exception(error)
            else:
                answer.set_result(found)

    def _learn(self, host: str, answer: Future[Addresses]) -> None:
        """Keep what was found; in its thread, so that it is kept if nobody waits any more."""
        error, known = answer.exception(), self._known.get(host)
        if known is None and len(self._known) >= MOST_KNOWN:
            self._known.clear()
        if error is None:
            self._known[host] = CachedLookup(answer.result(), time.monotonic() + FRESH_S)
        elif known is None or _is_final(error) or isinstance(known.found, BaseException):
            self._known[host] = CachedLookup(error, 0.0)
        self._under_way.pop(host, None)


NAMES = Resolver()  # of the process


async def connect(
    protocol: Callable[[], P],
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    handshake_s: float | None = None,
) -> tuple[asyncio.BaseTransport, P]:
    """Connect, to whichever of a name's addresses answers first.

    Raises an `OSError`, or for a host that can be no name a `UnicodeError`.
    """
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl": tls, "server_hostname": host, "ssl_handshake_timeout": handshake_s}
    loop = asyncio.get_running_loop()
    errors: list[OSError] = []
    left = deque(await NAMES.find(host))
    while left:
        try:
            if len(left) == 1:
                return await loop.create_connection(protocol, left.popleft(), port, **options)
            if (raw := await _first(left, port, errors)) is not None:
                return await loop.create_connection(protocol, sock=raw, **options)
        except ssl.SSLError:
            raise  # somebody is there
        except OSError as error:
            errors.append(error)
        except asyncio.CancelledError:  # it took too long
            NAMES.doubt(host)
            raise
    NAMES.doubt(host)
    raise errors[0] if len(errors) == 1 else NoAddressAnswersError(errors)


async def _first(left: deque[str], port: int, errors: list[OSError]) -> socket.socket | None:
    """Take addresses until one of them answers; None if none does, and why not is in `errors`."""
    loop = asyncio.get_running_loop()
    trying: dict[asyncio.Task[socket.socket], str] = {}
    try:
        while left or trying:
            if left:
                address = left.popleft()
                trying[loop.create_task(_reach(address, port))] = address
            done, _ = await asyncio.wait(
                trying,
                timeout=HEAD_START_S if left else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for each in done:
                del trying[each]
                try:
                    return each.result()
                except OSError as error:
                    errors.append(error)
    finally:
        for each, address in trying.items():
            each.cancel()
            each.add_done_callback(_drop)
            left.append(address)  # for where the one that answered breaks off a handshake
    return None


async def _reach(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    raw = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        raw.setblocking(False)
        # With its scope as it is written: uvloop heeds no other.
        await asyncio.get_running_loop().sock_connect(raw, (address, port))
    except BaseException:
        raw.close()
        raise
    return raw


def _drop(tried: asyncio.Task[socket.socket]) -> None:
    """Close what was reached when another had been reached already."""
    if not tried.cancelled() and tried.exception() is None:
        tried.result().close()


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_final(error: BaseException) -> bool:
    """Whether there is no such name; all else may be the resolver's own trouble."""
    return isinstance(error, UnicodeError) or (
        isinstance(error, socket.gaierror) and error.errno in NOBODY
    )

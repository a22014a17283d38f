"""As much HTTP as a benchmark needs: a request, and a callback for every piece of the answer.

A token costs one callback here, where a client with streams and tasks wakes a task for each. That
decides how many streams one core can watch without being what is measured.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools

from vllm_sched.bench.results.error_excerpt import excerpt
from vllm_sched.errors import UsageError

OK: Final = 200
# OpenSSL's: self-signed, itself or at the chain's end, or signed by nobody that is known here.
UNKNOWN_SIGNERS: Final = (18, 19, 20, 21)
OnBody = Callable[[bytes], None]
OnHeader = Callable[[bytes, bytes], None]


class WireError(Exception):
    """No whole answer came: refused, broken off, too late."""


@dataclass(frozen=True)
class Address:
    """Where an endpoint is."""

    host: str
    port: int
    tls: bool
    root: str  # what paths begin with: mostly nothing

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL, with or without the `/v1` that OpenAI's clients want at its end."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port, host = parts.port, parts.hostname
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise UsageError(f"--url {url}: is not a URL; write http://HOST:PORT")
        tls = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), tls, root)

    def __str__(self) -> str:
        """Write it as a URL."""
        return f"http{'s' * self.tls}://{self.authority}{self.root}"

    @property
    def authority(self) -> str:
        """Host and port, as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Wire:
    """Connections to one endpoint, kept open between requests."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        """Send these headers with every request."""
        self.address = address
        lines = {"Host": address.authority, "Content-Type": "application/json"}
        self._head = "".join(f"{k}: {v}\r\n" for k, v in (lines | dict(headers)).items())
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._tls = ssl.create_default_context() if address.tls else None

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Ask for a small answer."""
        return await self._whole("GET", path, b"", timeout_s)

    async def ask(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """Post for a small answer."""
        return await self._whole("POST", path, body, timeout_s)

    async def stream(
        self, path: str, body: bytes, on_header: OnHeader, on_body: OnBody, timeout_s: float
    ) -> None:
        """Post, and pass pieces of the answer on as they come; raises unless it came whole."""
        await self._send("POST", path, body, on_header, on_body, timeout_s)

    def close(self) -> None:
        """Close all connections."""
        for each in list(self._open):
            each.abort()

    async def _whole(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        pieces: list[bytes] = []
        await self._send(method, path, body, _ignore, pieces.append, timeout_s)
        return b"".join(pieces)

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes,
        on_header: OnHeader,
        on_body: OnBody,
        timeout_s: float,
    ) -> None:
        head = f"{method} {self.address.root}{path} HTTP/1.1\r\n{self._head}"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    kept = bool(self._idle)
                    connection = self._idle.pop() if kept else await self._connect()
                    try:
                        await connection.exchange(data, on_header, on_body)
                    except _UnansweredError as error:
                        if not kept:
                            raise WireError(str(error)) from None
                        continue  # it was closed while nobody used it
                    break
        except TimeoutError:
            raise WireError(f"no whole answer within {timeout_s:g} s") from None
        except OSError as error:
            raise WireError(f"{self.address}: {_words(error)}") from None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._idle, self._open),
            self.address.host,
            self.address.port,
            ssl=self._tls,
        )
        return connection


class _UnansweredError(Exception):
    """The connection ended before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, idle: list[_Connection], opened: set[_Connection]) -> None:
        self._idle = idle
        self._opened = opened
        self._done: asyncio.Future[None] | None = None
        self._begun = self._headed = self._framed = False

    async def exchange(self, data: bytes, on_header: OnHeader, on_body: OnBody) -> None:
        """Send a request and hand out its answer."""
        if self._transport.is_closing():
            raise _UnansweredError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._on_header, self._deliver = on_header, on_body
        self._begun = self._headed = self._framed = False
        self._refusal: list[bytes] = []
        done = self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            await done
        except asyncio.CancelledError:
            if self._done is done:  # and not of the next request on it
                self.abort()
            raise

    def abort(self) -> None:
        """Drop the connection now."""
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        """Take in part of an answer."""
        if self._done is None or self._done.done():
            self.abort()  # nobody asked
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(WireError(f"the answer is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        self._opened.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if not self._begun:
            self._end(_UnansweredError(str(error or "the connection was closed with no answer")))
        elif self._done and not self._done.done():
            if self._headed and not self._framed:  # it says so by ending
                self.on_message_complete()
            else:
                self._end(WireError(f"the answer broke off: {error or 'connection closed'}"))

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Begin an answer."""
        self._headed = self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        self._on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the headers."""
        self._headed = True

    def on_body(self, body: bytes) -> None:
        """Hand out a piece."""
        if self._parser.get_status_code() == OK:
            self._deliver(body)
        else:
            self._refusal.append(body)

    def on_message_complete(self) -> None:
        """End an answer."""
        status = self._parser.get_status_code()
        if status < OK:
            self._headed = False
            return  # early hints: the answer itself is still to come
        if status != OK:
            words = excerpt(b"".join(self._refusal))
            self._end(WireError(f"HTTP {status}: {words}"))
        else:
            self._end(None)
        if self._parser.should_keep_alive() and not self._transport.is_closing():
            self._idle.append(self)
        else:
            self._transport.close()

    def _end(self, error: Exception | None) -> None:
        if self._done and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


def _words(error: OSError) -> str:
    # asyncio says "Connect call failed", or lists what failed for each of a name's addresses.
    if isinstance(error, ConnectionRefusedError) or f"Errno {errno.ECONNREFUSED}" in str(error):
        return "connection refused; does anything listen there?"
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "; name who signed it with SSL_CERT_FILE=FILE.pem" * (
            error.verify_code in UNKNOWN_SIGNERS
        )
        return f"its certificate is not trusted: {excerpt(error.verify_message)}{remedy}"
    if isinstance(error, ssl.SSLError):
        return f"{excerpt(error.strerror or str(error))}; does that port speak TLS?"
    return excerpt(error.strerror or str(error))


def _ignore(_: bytes, __: bytes) -> None:
    pass

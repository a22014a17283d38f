"""A minimal HTTP client for benchmarks: one callback per piece of a response.

A client with streams and tasks would wake a task per token. One callback per token lets one core
watch many streams without a delay of its own.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools

from vllm_sched.errors import UsageError

MAX_EXCERPT_CHARACTERS = 300


def excerpt(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return " ".join(text.split())[:MAX_EXCERPT_CHARACTERS]


COMPLETIONS: Final = "/v1/completions"
OK: Final = 200
# OpenSSL's codes for self-signed certificates and unknown issuers.
UNKNOWN_ISSUER_CODES: Final = (18, 19, 20, 21)
OnBody = Callable[[bytes], None]
OnHeader = Callable[[bytes, bytes], None]


def _ignore(_: bytes, __: bytes) -> None:
    pass


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value)


class WireError(Exception):
    """The request failed: refused, interrupted or timed out."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool
    root: str  # path prefix, mostly empty

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL, with or without a final `/v1`."""
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
        return f"http{'s' * self.tls}://{self.authority}{self.root}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Wire:
    """Connections to one endpoint, kept open between requests."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], connect_s: float | None = None
    ) -> None:
        """Create a client; `connect_s`: the longest time for a connection, None for no limit."""
        self.address = address
        self._connect_s = connect_s
        lines = {"Host": address.authority, "Content-Type": "application/json"}
        self._head = _lines(lines | dict(headers))
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._tls = ssl.create_default_context() if address.tls else None

    async def get(self, path: str, timeout_s: float) -> bytes:
        return await self._fetch(self._request("GET", path, b""), timeout_s)

    async def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        return await self._fetch(self._request("POST", path, body), timeout_s)

    async def _fetch(self, request: bytes, timeout_s: float) -> bytes:
        pieces: list[bytes] = []
        await self._send(request, _ignore, pieces.append, timeout_s)
        return b"".join(pieces)

    async def stream(
        self,
        path: str,
        body: bytes,
        on_body: OnBody,
        timeout_s: float,
        *,
        on_header: OnHeader = _ignore,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a POST request and pass on the response's pieces; raise if it is incomplete."""
        await self._send(self._request("POST", path, body, headers), on_header, on_body, timeout_s)

    def _request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> bytes:
        head = f"{method} {self.address.root}{path} HTTP/1.1\r\n{self._head}{_lines(headers or {})}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _send(
        self, request: bytes, on_header: OnHeader, on_body: OnBody, timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(request, on_header, on_body)
        except TimeoutError:
            raise WireError(f"no complete response within {timeout_s:g} s") from None
        except OSError as error:
            raise WireError(f"{self.address}: {_error_text(error)}") from None

    async def _exchange(self, data: bytes, on_header: OnHeader, on_body: OnBody) -> None:
        """Use an idle connection that the server has not closed, else a new one."""
        while self._idle:
            with suppress(_UnansweredError):
                return await self._idle.pop().exchange(data, on_header, on_body)
        connection = await self._connect()
        try:
            await connection.exchange(data, on_header, on_body)
        except _UnansweredError as error:
            raise WireError(str(error)) from None

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()

    async def _connect(self) -> _Connection:
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(self._connect_s)
        try:
            async with limit:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle, self._open),
                    self.address.host,
                    self.address.port,
                    ssl=self._tls,
                )
        except TimeoutError:
            if not limit.expired():  # the kernel's limit
                raise
            why = f"no connection within {self._connect_s:g} s; check the address and firewalls"
            raise WireError(why) from None
        return connection


class _UnansweredError(Exception):
    """The connection ended before the first byte of a response."""


class _Connection(asyncio.Protocol):
    def __init__(self, idle: list[_Connection], opened: set[_Connection]) -> None:
        self._idle = idle
        self._opened = opened
        self._done: asyncio.Future[None] | None = None
        self._begun = self._has_head = self._has_length = False

    async def exchange(self, data: bytes, on_header: OnHeader, on_body: OnBody) -> None:
        if self._transport.is_closing():
            raise _UnansweredError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._on_header, self._deliver = on_header, on_body
        self._begun = self._has_head = self._has_length = False
        self._pieces: list[bytes] = []
        ended = self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            await ended
        except asyncio.CancelledError:
            if self._done is ended:  # not already used by the next request
                self.abort()
            raise

    def abort(self) -> None:
        self._transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.abort()  # data without a request
            return
        self._begun = True
        failure: httptools.HttpParserError | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            failure = error
        if (pieces := self._pieces) and self._parser.get_status_code() == OK:
            # Once per read, so that tokens that arrive together have the same time.
            self._deliver(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()
        if failure is not None:
            self._end(WireError(f"the response is not HTTP: {failure}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._opened.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if not self._begun:
            self._end(_UnansweredError(str(error or "the connection was closed with no answer")))
        elif self._done and not self._done.done():
            if self._has_head and not self._has_length:  # the close ends this response
                self.on_message_complete()
            else:
                self._end(WireError(f"the response broke off: {error or 'connection closed'}"))

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._has_head = self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        self._on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < OK:
            self._has_head = False
            return  # early hints; the response follows
        if status != OK:
            words = excerpt(b"".join(self._pieces))
            self._end(WireError(f"HTTP {status}: {words}" if words else f"HTTP {status}"))
        else:
            self._end()
        if self._parser.should_keep_alive() and not self._transport.is_closing():
            self._idle.append(self)
        else:
            self._transport.close()

    def _end(self, error: Exception | None = None) -> None:
        if self._done and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


def _error_text(error: OSError) -> str:
    # asyncio's own texts for refused connections are vague, or a list with one per address.
    if isinstance(error, ConnectionRefusedError) or f"Errno {errno.ECONNREFUSED}" in str(error):
        return "connection refused; is a server listening there?"
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "; set SSL_CERT_FILE=FILE.pem to its issuer's certificate" * (
            error.verify_code in UNKNOWN_ISSUER_CODES
        )
        return f"its certificate is not trusted: {excerpt(error.verify_message)}{remedy}"
    if isinstance(error, ssl.SSLError):
        return f"{excerpt(error.strerror or str(error))}; does this port use TLS?"
    return excerpt(error.strerror or str(error))

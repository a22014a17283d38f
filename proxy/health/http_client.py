"""An HTTP client for probes and warm-ups, over one persistent connection.

A client library would take twice the time per probe on the event loop that relays streams, and
10 MB of memory.
"""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

from proxy.config import WorkerTlsConfig
from proxy.errors import ProxyError
from proxy.http.response_parser import ResponseError, ResponseParser
from proxy.net.resolver import connect
from proxy.net.tls import to_worker

DEFAULT_PORTS = {"http": 80, "https": 443}

Answer = tuple[int, bytes]  # status and body


class ProbeResponseError(ProxyError):
    """An invalid or incomplete response."""


class HttpClient:
    """Sends one request at a time to a worker."""

    def __init__(self, url: str, api_key: str | None, tls: WorkerTlsConfig | None) -> None:
        address = urlsplit(url)
        self._where = address.hostname or "", address.port or DEFAULT_PORTS.get(address.scheme, 80)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        # Without compression there are no decompression bombs.
        head = f"Host: {address.netloc}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n{key}"
        self._head = head.encode()
        self._tls = tls
        self._line: HttpConnection | None = None

    async def get(self, path: str, max_bytes: int) -> Answer:
        """Return the response, of at most `max_bytes` bytes.

        Raises `ProbeResponseError`, `TlsError`, `OSError`, or `ValueError` for an invalid host.
        """
        request = b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), self._head)
        return await self._send(request, max_bytes)

    async def post(self, path: str, body: bytes, request_id: bytes, max_bytes: int) -> Answer:
        """Send JSON; otherwise as `get`."""
        head = b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\nX-Request-Id: %b\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        request = head % (path.encode(), self._head, request_id) + length + body
        return await self._send(request, max_bytes)

    async def _send(self, request: bytes, max_bytes: int) -> Answer:
        try:
            return await self._ask(request, max_bytes)
        except BaseException:  # a late response must not answer the next request
            self.close()
            raise

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    async def _ask(self, request: bytes, max_bytes: int) -> Answer:
        tls = to_worker(self._tls)  # a new context if the files changed
        if self._line is not None and self._line.is_usable and self._line.tls is tls:
            response = await self._line.ask(request, max_bytes)
            if response is not None:
                return response
        self.close()
        host, port = self._where
        # Set before it is connected, so that `close` works during `connect`.
        self._line = line = HttpConnection(tls)
        await connect(lambda: line, host, port, tls)
        response = await line.ask(request, max_bytes)
        if response is None:
            raise ProbeResponseError("it closed the connection without a response")
        return response


class HttpConnection(asyncio.Protocol):
    def __init__(self, tls: object) -> None:
        self.tls = tls
        self._parser = ResponseParser()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer | None] | None = None
        self._max_bytes = 0
        self._received = 0  # bytes

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, max_bytes: int) -> Answer | None:
        """Return the response; None if the connection ended before its first byte."""
        if self._transport is None:
            return None
        self._parser.expect()
        self._max_bytes, self._received = max_bytes, 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.close()
            return
        self._received += len(data)
        parser = self._parser
        try:
            parser.feed(data)
        except ResponseError as error:
            self._fail(f"its response is not HTTP: {error}")
            return
        if self._received > self._max_bytes:
            self._fail(f"its response has more than {self._max_bytes} bytes")
        elif parser.ended:
            self._end()
            if not parser.reusable:
                self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End a response that has no length; fail any other."""
        self._transport = None
        if error is None and self._parser.finish():
            self._end()
        elif self._received:
            self._fail("its response is incomplete")
        else:
            self._set(result=None)

    def _fail(self, why: str) -> None:
        response = self._answer
        self.close()
        if response is not None and not response.done():
            response.set_exception(ProbeResponseError(why))

    def _end(self) -> None:
        head = self._parser.head
        if head is not None:
            self._set((head.status, b"".join(self._parser.pieces)))

    def _set(self, result: Answer | None) -> None:
        response, self._answer = self._answer, None
        if response is not None and not response.done():
            response.set_result(result)

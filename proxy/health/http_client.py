"""GET from one worker, over a connection that is kept.

What probes need of HTTP, and no more: a client library takes twice as long for it, each second and
for each worker, on the event loop that relays the streams; and 10 MB.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import cast
from urllib.parse import urlsplit

import httptools

from proxy.config import WorkerTlsConfig
from proxy.errors import ProxyError
from proxy.net.resolver import connect
from proxy.net.tls import to_worker

PORTS = {"http": 80, "https": 443}
FRAMING = frozenset([b"content-length", b"transfer-encoding"])
BODILESS = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)

Answer = tuple[int, bytes]  # status and body


class ProbeResponseError(ProxyError):
    """What came was no answer, or not all of one; the message says what."""


class HttpClient:
    """Asks a worker one thing at a time."""

    def __init__(self, url: str, api_key: str | None, tls: WorkerTlsConfig | None) -> None:
        address = urlsplit(url)
        self._where = address.hostname or "", address.port or PORTS.get(address.scheme, 80)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        # Nor would we want to unpack a bomb.
        head = f"Host: {address.netloc}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n{key}\r\n"
        self._head = head.encode()
        self._tls = tls
        self._line: HttpConnection | None = None

    async def get(self, path: str, most: int) -> Answer:
        """Ask; raise if there is no answer, or one of more than so many bytes.

        The error is a `ProbeResponseError`, a `TlsError`, an `OSError` or, for an invalid host
        name, a `ValueError`.
        """
        request = b"GET %b HTTP/1.1\r\n%b" % (path.encode(), self._head)
        try:
            return await self._ask(request, most)
        except BaseException:  # cancelled, too: what comes late would be the next one's answer
            self.close()
            raise

    def close(self) -> None:
        """Leave nothing open."""
        if self._line is not None:
            self._line.close()
            self._line = None

    async def _ask(self, request: bytes, most: int) -> Answer:
        tls = to_worker(self._tls)  # another one once its files have changed
        if self._line is not None and self._line.is_usable and self._line.tls is tls:
            answer = await self._line.ask(request, most)
            if answer is not None:
                return answer
        self.close()
        host, port = self._where
        # Known before it is made: whoever gives up has to close it, however far it has come.
        self._line = line = HttpConnection(tls)
        await connect(lambda: line, host, port, tls)
        answer = await line.ask(request, most)
        if answer is None:
            raise ProbeResponseError("it closed the connection instead of answering")
        return answer


class HttpConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, tls: object) -> None:
        self.tls = tls  # what it was made with
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer | None] | None = None  # that is waited for
        self._most = 0
        self._begin()

    def _begin(self) -> None:
        self._came = 0  # bytes
        self._has_head = self._is_framed = False
        self._pieces: list[bytes] = []

    @property
    def is_usable(self) -> bool:
        """Whether another question may be put."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, most: int) -> Answer | None:
        """Put a question; None if the connection had ended before anything came of it."""
        if self._transport is None:
            return None
        self._begin()
        self._most = most
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Hear no more."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be ready."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Read on; who speaks unasked, or without end, is heard no more."""
        if self._answer is None:
            self.close()
            return
        self._came += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it switched protocols")
        except httptools.HttpParserError as error:
            self._fail(f"what it says is no HTTP: {error}")
        if self._answer is not None and self._came > self._most:
            self._fail(f"more than {self._most} bytes")

    def connection_lost(self, error: Exception | None) -> None:
        """Take it for the end of an answer without a length, or for none."""
        self._transport = None
        if self._has_head and not self._is_framed and error is None:
            self._done()
        elif self._came:
            self._fail("it ended in the middle")
        else:
            self._tell(None)

    def _fail(self, why: str) -> None:
        answer = self._answer
        self.close()
        if answer is not None and not answer.done():
            answer.set_exception(ProbeResponseError(why))

    def _done(self) -> None:
        self._tell((self._parser.get_status_code(), b"".join(self._pieces)))

    def _tell(self, what: Answer | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(what)

    # What the parser finds

    def on_message_begin(self) -> None:
        """See whether anybody asked: what follows an answer is nobody's."""
        if self._answer is None:
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002
        """See whether the answer tells where it ends."""
        if name.lower() in FRAMING:
            self._is_framed = True

    def on_headers_complete(self) -> None:
        """Note it; a 1xx is no answer yet."""
        status = self._parser.get_status_code()
        self._has_head = status >= HTTPStatus.OK
        self._is_framed = self._is_framed or status in BODILESS

    def on_body(self, piece: bytes) -> None:
        """Collect."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Hand it over, unless that was a 1xx."""
        if not self._has_head:
            self._is_framed = False
            return
        keep = self._parser.should_keep_alive()
        self._done()
        if not keep:
            self.close()

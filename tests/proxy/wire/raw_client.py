"""An HTTP client of raw bytes without hidden behaviour."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from tests.proxy.wire.fake_worker import DEADLINE_S, RST

JSON = b"application/json"
KEY, OTHER_KEY = "sk-vs-aaaaaaaaaaaaaaaa", "sk-vs-bbbbbbbbbbbbbbbb"  # of tenants


class BrokenError(Exception):
    """The response ended before its framing said so."""


@dataclass
class Head:
    """The head of a response."""

    version: bytes
    status: int
    headers: list[tuple[bytes, bytes]]  # names in lower case

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name.lower()]

    def one(self, name: bytes) -> bytes:
        """Return the value of a header that must occur once."""
        [value] = self.all(name)
        return value


@dataclass
class Answer(Head):
    """A response with its body."""

    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """Return the error of a response in OpenAI's format."""
        assert self.one(b"content-type").startswith(JSON), self
        error = self.json()["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert {"param", "code"} <= set(error)
        return dict(error)


def request(
    body: bytes = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}',
    *headers: bytes,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    version: str = "1.1",
    chunks: tuple[int, ...] | None = None,
) -> bytes:
    """Return the bytes of a request, in chunks of these sizes if given."""
    lines = [f"{method} {path} HTTP/{version}".encode(), b"Host: localhost", *headers]
    if body or method == "POST":
        lines.append(b"Content-Type: application/json")
    if chunks is not None:
        lines.append(b"Transfer-Encoding: chunked")
        body = framed(body, chunks)
    elif body or method == "POST":
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def get(path: str, *headers: bytes) -> bytes:
    """Return the bytes of a GET request."""
    return request(b"", *headers, path=path, method="GET")


def bearer(key: str = KEY) -> bytes:
    """Return an Authorization header with a key."""
    return b"Authorization: Bearer " + key.encode()


def chat(text: str = "hi", *headers: bytes, **fields: Any) -> bytes:
    """Return the bytes of a chat request."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 16, **fields}
    return request(json.dumps(body).encode(), *headers)


def framed(body: bytes, sizes: tuple[int, ...]) -> bytes:
    """Return a body in chunks; the last size is repeated."""
    out, at, number = [], 0, 0
    while at < len(body):
        size = sizes[min(number, len(sizes) - 1)]
        piece = body[at : at + size]
        out.append(b"%x\r\n%s\r\n" % (len(piece), piece))
        at, number = at + size, number + 1
    return b"".join(out) + b"0\r\n\r\n"


class Client:
    """A connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(
        cls,
        port: int,
        *,
        limit: int = 1 << 20,
        rcvbuf: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Client:
        """Open a connection. With a small buffer, the peer soon notices an unread socket."""
        raw = socket.socket()
        raw.setblocking(False)
        if rcvbuf:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        try:
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        except OSError:
            raw.close()
            raise
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host = None if tls is None else "127.0.0.1"
        made = await asyncio.open_connection(sock=raw, limit=limit, ssl=tls, server_hostname=host)
        return cls(*made)

    async def send(self, data: bytes, *, within: float = DEADLINE_S) -> None:
        """Write, and wait until the socket accepts more."""
        self.writer.write(data)
        async with asyncio.timeout(within):
            await self.writer.drain()

    async def ask(self, data: bytes, *, within: float = DEADLINE_S) -> Answer:
        await self.send(data, within=within)
        return await self.answer(head_only=data.startswith(b"HEAD "), within=within)

    async def head(self, *, within: float = DEADLINE_S) -> Head:
        """Read the head of a response."""
        async with asyncio.timeout(within):
            try:
                block = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                raise BrokenError(f"no whole head: {error.partial!r}") from None
        first, *lines = block[:-4].split(b"\r\n")
        version, status, *_ = first.split(b" ", 2)
        assert version in (b"HTTP/1.1", b"HTTP/1.0"), first
        split = [line.partition(b":") for line in lines]
        headers = [(name.lower(), value.strip(b" \t")) for name, _, value in split]
        return Head(version, int(status), headers)

    async def answer(self, *, head_only: bool = False, within: float = DEADLINE_S) -> Answer:
        """Read a whole response; raise if it ends early."""
        async with asyncio.timeout(within):
            head = await self.head(within=within)
            bodiless = head_only or head.status in (204, 304) or head.status < 200
            body = b"" if bodiless else await self.body(head, within=within)
        return Answer(head.version, head.status, head.headers, body)

    async def body(self, head: Head, *, within: float = DEADLINE_S) -> bytes:
        """Read a body as its head frames it; `within` holds for each chunk."""
        lengths, codings = head.all(b"content-length"), head.all(b"transfer-encoding")
        assert len(lengths) + len(codings) <= 1, f"ambiguous framing: {head}"
        if codings:
            assert codings == [b"chunked"]
            pieces = []
            while piece := await self.piece(within=within):
                pieces.append(piece)
            return b"".join(pieces)
        if lengths:
            return await self._exactly(int(lengths[0]))
        return await self.reader.read()

    async def piece(self, *, within: float = DEADLINE_S) -> bytes:
        """Read a chunk; empty bytes are the end."""
        async with asyncio.timeout(within):
            try:
                size = int(await self.reader.readuntil(b"\r\n"), 16)
            except (asyncio.IncompleteReadError, ValueError) as error:
                raise BrokenError(f"no chunk: {error}") from None
            data = await self._exactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self.reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise BrokenError(f"{size - len(error.partial)} bytes missing") from None

    async def closed(self, *, within: float = DEADLINE_S) -> bytes:
        """Wait for the end of the connection; return the data before it."""
        async with asyncio.timeout(within):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def read_on(self) -> None:
        """Read without the small limit from now on."""
        self.reader._limit = 1 << 20  # type: ignore[attr-defined]

    def half_close(self) -> None:
        self.writer.write_eof()

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.transport.abort()

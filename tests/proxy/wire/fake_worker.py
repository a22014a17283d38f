"""A scripted worker: a server of raw bytes, strict about its requests.

Each request becomes a `Call`, which records the request and the loss of its peer. A `Script`, a
coroutine that may write anything at any pace, answers it. `scripts.py` has ready-made scripts.
`faults` lists violations that a strict server would refuse.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from tests.proxy.wire import scripts

# Longer than the pauses of a busy machine, shorter than the router's own timeouts of ten seconds.
DEADLINE_S = 9.0
BYTES_PER_TURN = 1 << 16  # a script yields to its loop after so many bytes
RST = struct.pack("ii", 1, 0)  # SO_LINGER: unsent data is dropped, and the peer gets a reset


class PeerGoneError(Exception):
    """The peer closed while a script was writing."""


@dataclass(eq=False)
class Call:
    """A request, and the means to answer it."""

    head: bytes  # request line and headers
    connection: Connection
    body: bytes = b""  # without its framing
    arrived: float = field(default_factory=time.monotonic)
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # the peer left before the end
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the script ran to its end

    @property
    def method(self) -> bytes:
        return self.head.split(b" ", 1)[0]

    @property
    def target(self) -> bytes:
        """The path and query."""
        return self.head.split(b" ", 2)[1]

    @property
    def path(self) -> str:
        """The path without its query."""
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Names in lower case and stripped values, in order."""
        lines = self.head.split(b"\r\n")[1:]
        split = (line.partition(b":") for line in lines if line)
        return [(name.lower(), value.strip(b" \t")) for name, _, value in split]

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        """Write, and wait until the socket accepts more."""
        await self.connection.send(data)

    async def was_lost(self) -> None:
        """Wait until the peer leaves before the end."""
        async with asyncio.timeout(DEADLINE_S):
            await self.lost.wait()

    def half_close(self) -> None:
        self.connection.half_close()

    def close(self) -> None:
        """Send all written data, then close."""
        self.connection.transport.close()

    def reset(self) -> None:
        self.connection.reset()


Script = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True)
class SlowWire:
    """Bytes per read and write, with a pause between."""

    piece: int = 256
    window: int = 4096  # receive buffer of new connections
    gap_s: float = 0.01


class Connection(asyncio.Protocol):
    """A connection from the router."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.calls: list[Call] = []
        self.gone = asyncio.Event()
        self.stalled = asyncio.Event()  # the peer accepts no more for now
        self.flows = asyncio.Event()
        self.flows.set()
        self.sent = 0
        self.transport: asyncio.Transport
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=64 * 1024)
        self.worker.connections.append(self)
        if (slow := self.worker.slow_wire) is not None:
            raw = transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, slow.window)
        if not self.worker.reads:
            asyncio.get_running_loop().call_soon(self._stop_reading)

    def _stop_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if (slow := self.worker.slow_wire) is not None:
            self._stop_reading()
            asyncio.get_running_loop().call_later(slow.gap_s, self._resume_reading)
        if self.worker.cuts_left and len(self._buffer) > self.worker.cut_after:
            self.worker.cuts_left -= 1
            self.reset()
        elif self._task is not None:
            self.worker.faults.append("bytes came before the last answer was complete")
        else:
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.gone.set()
        self.flows.set()
        if self.calls and not self.calls[-1].answered.is_set():
            self.calls[-1].lost.set()

    def pause_writing(self) -> None:
        self.flows.clear()
        self.stalled.set()

    def resume_writing(self) -> None:
        self.stalled.clear()
        self.flows.set()

    async def send(self, data: bytes) -> None:
        if (slow := self.worker.slow_wire) is None:
            await self._send(data)
            return
        for at in range(0, len(data), slow.piece):
            await asyncio.sleep(slow.gap_s)  # not after the last piece: the next request may come
            await self._send(data[at : at + slow.piece])

    async def _send(self, data: bytes) -> None:
        self._check_open()
        self.transport.write(data)
        before, self.sent = self.sent, self.sent + len(data)
        if before // BYTES_PER_TURN != self.sent // BYTES_PER_TURN:  # to notice a lost peer
            await asyncio.sleep(0)
        await self.flows.wait()

    def half_close(self) -> None:
        self._check_open()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS has no half close
            self.transport.close()

    def _check_open(self) -> None:
        if self.gone.is_set() or self.transport.is_closing():
            raise PeerGoneError

    def close_unread(self) -> None:
        """Close at once, as a server closes an idle connection; later data is never read."""
        raw = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        raw.shutdown(socket.SHUT_RDWR)
        raw.close()

    def reset(self) -> None:
        if self.transport.is_closing():
            return
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self.transport.abort()

    def _next(self) -> None:
        """Start on the next request if it is complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[: end + 4])
        call = Call(head, self)
        try:
            taken = self._read_body(call, end + 4)
        except ValueError as error:
            self.worker.faults.append(f"{error} in {head!r}")
            self.transport.abort()
            return
        if taken is None:
            return
        del self._buffer[:taken]
        self.calls.append(call)
        self.worker.arrive(call)
        self._task = asyncio.get_running_loop().create_task(self._answer(call))

    def _read_body(self, call: Call, start: int) -> int | None:
        """Set the body; return its end, or None while bytes are missing."""
        lengths, codings = call.all(b"content-length"), call.all(b"transfer-encoding")
        if (lengths and codings) or len(lengths) > 1 or codings not in ([], [b"chunked"]):
            raise ValueError("ambiguous framing")
        if codings:
            return self._read_chunks(call, start)
        length = int(lengths[0]) if lengths else 0
        if len(self._buffer) < start + length:
            return None
        call.body = bytes(self._buffer[start : start + length])
        return start + length

    def _read_chunks(self, call: Call, start: int) -> int | None:
        """Set the body from its chunks; return its end, or None while bytes are missing."""
        at, pieces = start, []
        while (line := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(self._buffer[at:line], 16)
            at = line + 2 + size + 2
            if len(self._buffer) < at:
                return None
            if self._buffer[at - 2 : at] != b"\r\n":
                raise ValueError("a chunk of another size than stated")
            pieces.append(bytes(self._buffer[line + 2 : at - 2]))
            if not size:
                call.body = b"".join(pieces)
                return at
        return None

    async def _answer(self, call: Call) -> None:
        try:
            await self.worker.script_for(call)(call)
        except PeerGoneError:
            return
        except Exception as error:  # a mistake of the test, which must not go unnoticed
            self.worker.faults.append(f"the script failed: {error!r}")
            self.transport.abort()
            return
        if call.lost.is_set():
            return
        call.answered.set()
        self._task = None
        if not self.transport.is_closing():
            self._next()

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.transport.abort()
        await self.gone.wait()


def _is_connected(raw: socket.socket) -> bool:
    try:
        raw.getpeername()
    except OSError:
        return False
    return True


class FakeWorker:
    """A server on a loopback port; its scripts may change at any time."""

    def __init__(
        self, name: str = "w0", *, model: str = "tiny", max_model_len: int = 16384
    ) -> None:
        self.name, self.model, self.max_model_len = name, model, max_model_len
        self.connections: list[Connection] = []
        self.calls: list[Call] = []
        self.faults: list[str] = []
        self.reads = True
        self.cuts_left = 0  # requests to reset while they arrive,
        self.cut_after = 0  # after this many bytes
        self.slow_wire: SlowWire | None = None
        self.port = 0
        self.tls: ssl.SSLContext | None = None  # set before it listens
        self._held_port: socket.socket | None = None
        self._waiting: set[asyncio.Event] = set()
        self._server: asyncio.Server | None = None
        self._hanging: list[socket.socket] = []
        self._next: deque[Script] = deque()
        self._paths: dict[str, Script] = {
            "/health": scripts.answer(body=b"", content_type=b"text/plain"),
            "/metrics": scripts.answer(body=scripts.METRICS, content_type=b"text/plain"),
            "/v1/models": scripts.models(model, max_model_len),
            "/tokenize": scripts.tokenize,
        }
        self._default: Script = scripts.obey(name)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def served(self) -> list[Call]:
        """The calls except probes and token counts."""
        return [call for call in self.calls if call.path not in self._paths]

    @property
    def open(self) -> list[Connection]:
        """The connections that the peer has not closed."""
        return [connection for connection in self.connections if not connection.gone.is_set()]

    def always(self, script: Script, path: str | None = None) -> None:
        """Answer all calls, or those to one path, with a script."""
        if path is None:
            self._default = script
        else:
            self._paths[path] = script

    def then(self, *answers: Script) -> None:
        """Answer the next calls with these scripts, then with the usual script again."""
        self._next.extend(answers)

    def hold(self, script: Script | None = None) -> asyncio.Event:
        """Answer all calls (by default with 200) once the returned event is set."""
        gate = asyncio.Event()
        self.always(scripts.gated(gate, script or scripts.answer()))
        return gate

    def hold_next(self, script: Script | None = None) -> asyncio.Event:
        """Answer the next call once the returned event is set."""
        gate = asyncio.Event()
        self.then(scripts.gated(gate, script or scripts.answer()))
        return gate

    def script_for(self, call: Call) -> Script:
        if call.path in self._paths:
            return self._paths[call.path]
        return self._next.popleft() if self._next else self._default

    async def listen(self, *, backlog: int = 1000) -> None:
        """Accept connections, on the previous port if there was one."""
        self._hold_port()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self),
            "127.0.0.1",
            self.port,
            backlog=backlog,
            ssl=self.tls,
            reuse_port=True,
        )

    def _hold_port(self) -> None:
        """Bind a socket that never listens: no other process gets the port during `refuse`."""
        if self._held_port is None:
            self._held_port = socket.socket()
            self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._held_port.bind(("127.0.0.1", self.port))
            self.port = self._held_port.getsockname()[1]

    async def hang(self) -> None:
        """Let new connections hang: they are neither accepted nor refused.

        The kernel accepts connections until the socket's queue is full, so the queue is filled.
        """
        await self.refuse()
        server = socket.create_server(("127.0.0.1", self.port), backlog=0, reuse_port=True)
        self._hanging = [server]
        loop = asyncio.get_running_loop()
        hangs = False
        while not hangs:
            filler = socket.socket()
            filler.setblocking(False)
            self._hanging.append(filler)
            try:
                async with asyncio.timeout(0.1):
                    await loop.sock_connect(filler, server.getsockname())
            except TimeoutError:
                hangs = not _is_connected(filler)  # else this process was only slow

    async def wake(self) -> None:
        """Accept the connections that hang."""
        server, *fillers = self._hanging
        for filler in fillers:
            filler.close()
        self._hanging = []
        server.listen(1000)
        server.setblocking(False)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), sock=server, ssl=self.tls)

    async def refuse(self) -> None:
        """Close the listening socket; open connections stay."""
        for filler in self._hanging:
            filler.close()
        self._hanging = []
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)

    async def die(self) -> None:
        """Refuse new connections, and reset all others."""
        await self.refuse()
        for connection in self.open:
            connection.reset()
            await connection.end()

    async def stop(self) -> None:
        await self.refuse()
        if self._held_port is not None:
            self._held_port.close()
            self._held_port = None
        for connection in self.connections:
            await connection.end()

    def arrive(self, call: Call) -> None:
        """Record a call, and wake tasks that wait for calls."""
        self.calls.append(call)
        for event in self._waiting:
            event.set()

    async def got(
        self, number: int = 1, *, path: str | None = None, within: float = DEADLINE_S
    ) -> Call:
        """Wait until `number` calls have come (to a path); return the last of them."""
        arrived = asyncio.Event()
        self._waiting.add(arrived)
        try:
            async with asyncio.timeout(within):
                while len(calls := self._calls_to(path)) < number:
                    arrived.clear()
                    await arrived.wait()
        finally:
            self._waiting.discard(arrived)
        return calls[number - 1]

    def _calls_to(self, path: str | None) -> list[Call]:
        if path is None:
            return self.served
        return [call for call in self.calls if call.path == path]

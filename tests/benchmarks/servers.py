"""Servers for benchmark clients: the mock worker, and servers with fixed answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from benchmarks.router import mock

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DEADLINE_S = 60.0


@asynccontextmanager
async def mock_worker(kind: type[mock.Worker] = mock.Worker) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def answering(reply: bytes, *, then_close: bool = False) -> AsyncIterator[int]:
    """Answer every request with these bytes; yield the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(mock.END_OF_HEAD):
                length = mock.LENGTH.search(head)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(reply)
                await writer.drain()
                if then_close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0)

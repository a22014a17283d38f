"""Clients that send prebuilt requests and count errors.

Errors are a wrong status, a body that is incomplete or not the mock's, a missing event and a
missing answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from benchmarks.router.answers import Answer, BadAnswerError, Events
from benchmarks.router.prompts import Prompts

HOST = "127.0.0.1"
OK = 200
CONNECT_S = 5.0
FINISH_S = 10.0  # for outstanding answers after a measurement
PAUSE_S = 0.05  # before a new connection after a failed one
# One of the routers reformats JSON when it hands over.
BODY_STARTS = (b'{"id": "chatcmpl-', b'{"id":"chatcmpl-')
BODY_END = b"}}"


@dataclass
class Tally:
    """Counts of one window."""

    done: int = 0  # complete and correct answers
    events: int = 0  # of streams
    latencies: list[float] = field(default_factory=list)  # seconds


class Exchange(asyncio.Protocol):
    """A connection with at most one request in flight; `ended` is set when it closes."""

    def __init__(self, load: Load) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed = False
        self._load = load
        self._transport: asyncio.Transport
        self._answer: Answer | None = None
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's derives from nothing
        self._send()

    def _send(self) -> None:
        self._answer = Answer()
        self._sent_at = time.perf_counter()
        self._transport.writelines(self._load.prompts.next())

    def data_received(self, data: bytes) -> None:
        """Parse the data; abort the connection if it is not the mock's answer."""
        try:
            if self._answer is None:
                raise BadAnswerError("bytes without a request")
            self._read(self._answer, self._answer.feed(data))
        except BadAnswerError as error:
            self.fail(str(error))

    def _read(self, answer: Answer, body: bytes) -> None:
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """Count an error and abort the connection."""
        if not self.failed:
            self.failed = True
            self._load.errors[reason] += 1
            self._transport.abort()

    def close(self) -> None:
        self._answer = None
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Count an incomplete answer as an error."""
        if self._answer is not None:
            self.fail(f"cut off: {error}" if error else "cut off")
        if not self.ended.done():
            self.ended.set_result(None)


class ClosedLoopExchange(Exchange):
    """Sends the next request when it has an answer, after a random pause if the load has any."""

    _body = b""

    def _read(self, answer: Answer, body: bytes) -> None:
        self._body += body
        if not answer.complete:
            return
        load, took = self._load, time.perf_counter() - self._sent_at
        if answer.status != OK:
            load.errors[f"HTTP {answer.status}"] += 1
        elif not (self._body.startswith(BODY_STARTS) and self._body.endswith(BODY_END)):
            load.errors[f"not the mock's answer: {self._body[:80]!r}"] += 1
        else:
            load.tally.done += 1
            load.tally.latencies.append(took)
        self._body = b""
        if answer.closes:
            self.close()
        elif load.pause_s:
            pause = random.expovariate(1 / load.pause_s)
            asyncio.get_running_loop().call_later(pause, self._send_next)
        else:
            self._send_next()

    def _send_next(self) -> None:
        if self._load.stopping:
            self.close()
        else:
            self._send()


class StreamExchange(Exchange):
    """Reads one stream to its end."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._events = Events()

    def _read(self, answer: Answer, body: bytes) -> None:
        load, events = self._load, self._events
        if answer.status not in (0, OK):
            raise BadAnswerError(f"HTTP {answer.status}")
        new = events.feed(body)
        load.tally.events += new
        if new and new == events.count:
            load.open += 1
            load.most_open = max(load.most_open, load.open)
        if not answer.complete:
            return
        if not events.done:
            raise BadAnswerError("stream without its end")
        if events.count != load.prompts.events:
            raise BadAnswerError(f"stream of {events.count} events of {load.prompts.events}")
        load.tally.done += 1
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Count the stream as closed."""
        self._load.open -= bool(self._events.count)
        super().connection_lost(error)


class Load:
    """Connections to one port; `tally` counts the current window, `errors` the whole run."""

    def __init__(self, port: int, prompts: Prompts, pause_s: float = 0.0) -> None:
        self.port = port
        self.prompts = prompts
        self.pause_s = pause_s  # the mean
        self.tally = Tally()
        self.errors: Counter[str] = Counter()
        self.stopping = False
        self.open = self.most_open = 0  # streams in flight
        self.exchanges: set[Exchange] = set()

    async def connect(self, kind: type[Exchange]) -> None:
        """Open a connection and wait for its end; count failures."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, exchange = await loop.create_connection(lambda: kind(self), HOST, self.port)
        except OSError as error:  # includes TimeoutError
            self.errors[f"no connection: {error or 'too slow'}"] += 1
            await asyncio.sleep(PAUSE_S)
            return
        self.exchanges.add(exchange)
        await exchange.ended
        self.exchanges.remove(exchange)
        if exchange.failed:
            await asyncio.sleep(PAUSE_S)

    async def finish(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait for outstanding answers; count those that do not arrive as errors."""
        self.stopping = True
        _, late = await asyncio.wait(tasks, timeout=FINISH_S)
        for exchange in [*self.exchanges]:
            exchange.fail(f"no answer within {FINISH_S:g} s")
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def closed_loop(
    port: int, prompts: Prompts, connections: int, pause_s: float = 0.0
) -> AsyncIterator[Load]:
    """Keep at most one request in flight on each connection."""
    load = Load(port, prompts, pause_s)

    async def keep_connected() -> None:
        while not load.stopping:
            await load.connect(ClosedLoopExchange)

    tasks = [asyncio.create_task(keep_connected()) for _ in range(connections)]
    try:
        yield load
    finally:
        await load.finish(tasks)


@asynccontextmanager
async def streams(port: int, prompts: Prompts, count: int, over_s: float) -> AsyncIterator[Load]:
    """Start `count` streams evenly over `over_s`; wait for their ends on exit."""
    load = Load(port, prompts)

    async def follow(number: int) -> None:
        await asyncio.sleep(number * over_s / count)
        await load.connect(StreamExchange)

    tasks = [asyncio.create_task(follow(number)) for number in range(count)]
    try:
        yield load
    finally:
        await load.finish(tasks)

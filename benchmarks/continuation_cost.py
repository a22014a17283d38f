"""Measure what streams that can be continued cost the router: processor time per streamed piece.

Three routers serve the same paced streams in turns: one without journals, one that reads the
journal of the mock worker, and one that also keeps what a continuation needs. The mock worker
publishes each piece as a token. CPU time is that of the router's process in the window.

    python -m benchmarks.continuation_cost [--rounds 5] [--load chunks]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
from rich.console import Console
from rich.table import Table

from benchmarks.router import measure, mock, processes, stage
from benchmarks.router.load import HOST
from vllm_sched.workers.launch import Worker, free_port

PLAIN, OFF, ON = "no journal", "router.continuation: false", "router.continuation: true"
TARGET = 1.05
STEP_S = 0.025  # between two messages of the mock's journal
MICRO = 1e6
REQUEST_ID = re.compile(rb"\r\nx-request-id: *([^\r]+)", re.IGNORECASE)
RUN = b"mockmock"


class MockJournal:
    """A journal whose tokens are the pieces of the mock's streams."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(f"tcp://{HOST}:{port}")
        self._message = 0
        self._last = 0  # number of a request
        self._arrived: list[tuple[int, str, int]] = []
        self._tokens: dict[int, int] = {}  # new tokens of each request
        self._ended: list[int] = []

    def arrive(self, request_id: bytes) -> int:
        self._last += 1
        self._arrived.append((self._last, f"chatcmpl-{request_id.decode()}-0a1b2c3d", 256))
        return self._last

    def add_token(self, number: int) -> None:
        self._tokens[number] = self._tokens.get(number, 0) + 1

    def end(self, number: int) -> None:
        self._ended.append(number)

    async def run(self) -> None:
        """Publish a step every `STEP_S`, and answer readers."""
        while True:
            await asyncio.sleep(STEP_S)
            counts, total = [*self._tokens.values()], sum(self._tokens.values())
            ended = [(number, "stop") for number in self._ended]
            step = (
                self._arrived, [], False, [], [], [*self._tokens],
                counts if total > len(counts) else [], [7] * total, [], ended, self._ended,
            )  # fmt: skip
            self._message += 1
            self._send(b"step", step)
            self._arrived, self._tokens, self._ended = [], {}, []
            while self._socket.poll(0):
                message = self._socket.recv()
                if message.startswith(b"\x01snapshot/"):
                    self._send(message[1:], (16, []))

    def close(self) -> None:
        self._socket.close(linger=0)

    def _send(self, topic: bytes, payload: Any) -> None:
        position = RUN + self._message.to_bytes(8, "big")
        self._socket.send_multipart([topic, position, msgspec.msgpack.encode(payload)])


class JournaledMock(mock.Worker):
    """One connection from a router."""

    journal: MockJournal

    def __init__(self) -> None:
        super().__init__()
        self._id = b""
        self._number = 0  # 0: no stream

    def data_received(self, data: bytes) -> None:
        if (match := REQUEST_ID.search(data)) is not None:
            self._id = match[1]
        super().data_received(data)

    def _serve(self, start: bytes, body: bytes) -> None:
        if start.startswith(mock.COMPLETIONS) and mock.STREAM.search(body):
            self._number = self.journal.arrive(self._id)
        super()._serve(start, body)

    def _send_event(self) -> None:
        self.journal.add_token(self._number)
        super()._send_event()
        if self._events_left <= 0:
            self._end()

    def _end(self) -> None:
        if self._number:
            self.journal.end(self._number)
            self._number = 0

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
        super().connection_lost(error)


async def serve(port: int, journal_port: int) -> None:
    """Serve as the mock worker until killed."""
    JournaledMock.journal = MockJournal(journal_port)
    await asyncio.get_running_loop().create_server(JournaledMock, HOST, port, backlog=4096)
    await JournaledMock.journal.run()


def router(folder: Path, name: str, url: str, journal: str) -> Worker:
    """Return a router with its defaults and one worker."""
    worker = {"name": "w0", "url": url} | ({} if name == PLAIN else {"journal": journal})
    router = {"continuation": name == ON}
    fleet = {"model": mock.MODEL, "workers": [worker], "router": router}
    path = folder / f"{(PLAIN, OFF, ON).index(name)}.yaml"
    return stage.router_process(name, path, fleet)


def wait_for_journal(port: int) -> None:
    while True:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as page:
            if b'proxy_journal_up{worker="w0"} 1' in page.read():
                return
        time.sleep(STEP_S)


async def run(folder: Path, load: str, rounds: int) -> list[measure.Sample]:
    cpus = stage.Cpus.apart()
    port, journal_port = free_port(), free_port()
    command = [sys.executable, "-m", "benchmarks.continuation_cost"]
    command += ["--serve", str(port), str(journal_port)]
    with processes.running_on(cpus.others):
        async with AsyncExitStack() as stack:
            worker = stage.process("mock worker", command, port)
            await stack.enter_async_context(worker)
            sides = []
            for name in (PLAIN, OFF, ON):
                side = router(folder, name, f"http://{HOST}:{port}", f"tcp://{HOST}:{journal_port}")
                stack.push_async_callback(asyncio.to_thread, side.stop)
                with processes.running_on(cpus.routers):
                    side.start()
                await stage.wait_served(side)
                sides.append(stage.Side(name, side.port, side))
                if name != PLAIN:
                    await asyncio.to_thread(wait_for_journal, side.port)
            results = await measure.measure(sides, [load], rounds, measure.Times(), lambda _: None)
            return results.samples


def costs(samples: Sequence[measure.Sample]) -> dict[str, list[float]]:
    """Return the microseconds per piece of each side, by round."""
    by_side: dict[str, list[float]] = {PLAIN: [], OFF: [], ON: []}
    for sample in samples:
        assert not sample.errors, sample.errors
        by_side[sample.side].append(sample.cpu_s / sample.events * MICRO)
    return by_side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", choices=(measure.CHUNKS, measure.MANY_STREAMS), default="chunks")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if arguments.serve:
            runner.run(serve(*arguments.serve))
            return
        with tempfile.TemporaryDirectory() as folder:
            samples = runner.run(run(Path(folder), arguments.load, arguments.rounds))
    by_side = costs(samples)
    table = Table("router", "us per piece", f"against {OFF}")
    for name, values in by_side.items():
        ratio = statistics.median(
            value / off for value, off in zip(values, by_side[OFF], strict=True)
        )
        table.add_row(name, f"{statistics.median(values):.1f}", f"{ratio:.3f}x")
        if name == ON:
            verdict = "met" if ratio <= TARGET else "MISSED"
    Console().print(table)
    Console().print(f"at most {TARGET}x: {verdict}")


if __name__ == "__main__":
    main()

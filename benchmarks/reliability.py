"""Inject the same faults into three routers: ours, vllm-router and sglang-router.

    python -m benchmarks.reliability

For each line of the table each router is started with its defaults and two fake workers. The peers
are installed in the environment of `benchmarks.router`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router.opponents import ROUND_ROBIN, Opponent, install, peers
from tests.fuzz.test_bodies import HARD, REFUSED
from tests.proxy.wire import scripts
from tests.proxy.wire.client.test_framing import (
    AMBIGUOUS,
    BAD_CHUNKS,
    BODY,
    CHUNKED,
    GARBAGE,
    HEAD,
    HOST,
    POST,
    SMUGGLED,
)
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.raw_client import BrokenError, Client, chat, request
from vllm_sched.workers.launch import Worker, free_port

READY_TIMEOUT_S, SHORT_TIMEOUT_S, TIMEOUT_S, REQUESTS = 60.0, 2.0, 8.0, 20
SLOW, SLOW_MIB = 14, 60  # slow clients, and the size of each one's body or answer
STREAMS, ODD_BYTES = 8, 1 << 20  # streams when a router stops; size of a body that is slow to parse
REFUSED_CONNECTION, CUT_OFF = "no connection", "cut off"
TITLE_WIDTH, COLUMN_WIDTH = 58, 22
MODEL = "tiny"
PROMPT = b'{"model": "tiny", "prompt": "xy"}'


@dataclass
class Scene:
    """A router and its two workers."""

    port: int
    fakes: list[FakeWorker]
    router: Worker

    @property
    def pid(self) -> int:
        """The router's process and group id."""
        assert self.router.pid is not None
        return self.router.pid

    def answer_with(self, script: Script) -> None:
        """Set the script of both workers."""
        for fake in self.fakes:
            fake.always(script)

    def served(self) -> list[Call]:
        return [call for fake in self.fakes for call in fake.served if call.method == b"POST"]

    def memory(self) -> int:
        """Return the resident memory of the router's processes, in MiB."""
        kib = 0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid:
                    status = (path / "status").read_text()
                    kib += int(status.partition("VmRSS:")[2].split()[0])
        return kib >> 10

    async def send(self, data: bytes, within: float = TIMEOUT_S) -> str:
        """Send a request and return its outcome as a client sees it."""
        try:
            client = await Client.connect(self.port)
        except ConnectionError:
            return REFUSED_CONNECTION
        try:
            client.writer.write(data)
            answer = await client.answer(within=within)
        except (BrokenError, ConnectionError):
            return CUT_OFF
        except TimeoutError:
            return "hangs"
        except (ValueError, AssertionError):
            return "not HTTP"
        finally:
            client.close()
        if answer.status != 200:
            return str(answer.status)
        if answer.all(b"content-type")[:1] == [scripts.SSE] and scripts.DONE not in answer.body:
            return "error event" if b'"error"' in answer.body else "cut, looks complete"
        return "200"


Scenario = Callable[[Scene], Awaitable[str]]


async def send_ambiguous(scene: Scene) -> str:
    """Count the forwarded requests whose end is ambiguous."""
    cases = list(AMBIGUOUS.values())
    cases += [POST + HOST + CHUNKED + b"\r\n" + chunks for chunks in BAD_CHUNKS.values()]
    forwarded = 0
    for data in map(as_completion, cases):
        before = len(scene.served())
        client = await Client.connect(scene.port)
        with suppress(ConnectionError):
            client.writer.write(data + SMUGGLED)
        with suppress(TimeoutError):
            await client.closed(within=0.5)
        client.close()
        forwarded += len(scene.served()) > before
    return f"{forwarded} of {len(cases)}"


def as_completion(data: bytes) -> bytes:
    """Return the request as one that all three routers accept, except for its framing."""
    data = data.replace(b"/v1/chat/completions", b"/v1/completions").replace(BODY, PROMPT)
    return data.replace(b"\r\n", b"\r\nContent-Type: application/json\r\n", 1)


async def send_exact_body(scene: Scene) -> str:
    """Return whether a body arrives byte for byte."""
    body = b'{"model": "tiny", "x": null, "temperature": 0.70, "messages": '
    body += b'[{"role": "user", "content":"x"}], "y": "\\u00e9"}'
    await scene.send(request(body))
    return "yes" if any(call.body == body for call in scene.served()) else "no"


async def send_kv_transfer_params(scene: Scene) -> str:
    """Return whether a client can set the address that a worker connects to."""
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
    await scene.send(chat(kv_transfer_params=params))
    return "passed" if any(b"remote_host" in call.body for call in scene.served()) else "refused"


def cut_stream(end: str) -> Scenario:
    """Return a scenario in which a stream ends early."""

    async def run(scene: Scene) -> str:
        scene.answer_with(scripts.stream(3, gap_s=0.02, end=end))
        return await scene.send(chat(stream=True))

    return run


async def cut_body(scene: Scene) -> str:
    """End a JSON response before its length."""
    scene.answer_with(scripts.raw(HEAD + b'Content-Length: 100\r\n\r\n{"half": ', end="close"))
    return await scene.send(chat())


def fail_one(script: Script | None) -> Scenario:
    """Return a scenario that counts the requests answered while one worker fails."""

    async def run(scene: Scene) -> str:
        if script is None:
            await scene.fakes[0].die()
        else:
            scene.fakes[0].always(script)
        outcomes = [await scene.send(chat(), SHORT_TIMEOUT_S) for _ in range(REQUESTS)]
        return f"{outcomes.count('200')} of {REQUESTS}"

    return run


def disconnect(stream: bool) -> Scenario:
    """Return a scenario in which the client disconnects, and the worker should notice."""

    async def run(scene: Scene) -> str:
        scene.answer_with(scripts.stream(1000, gap_s=0.02) if stream else scripts.stall)
        client = await Client.connect(scene.port)
        client.writer.write(chat(stream=stream))
        if stream:
            await client.head(within=TIMEOUT_S)
        calls = [asyncio.ensure_future(fake.got()) for fake in scene.fakes]
        done, others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        client.close()
        [call] = [run.result() for run in done]
        try:
            async with asyncio.timeout(SHORT_TIMEOUT_S):
                await call.lost.wait()
        except TimeoutError:
            return f"not in {SHORT_TIMEOUT_S:g} s"
        return "yes"

    return run


async def send_unfinished_bodies(scene: Scene) -> str:
    """Send large bodies without their ends; return memory growth and the next outcome."""
    before = scene.memory()
    clients = [await Client.connect(scene.port) for _ in range(SLOW)]
    head = POST + HOST + b"Content-Length: %d\r\n\r\n"
    for client in clients:
        with suppress(ConnectionError, TimeoutError):
            await client.send(as_completion(head % (SLOW_MIB + 1 << 20)))
            for _ in range(SLOW_MIB):
                await client.send(b" " * (1 << 20))
    grown = await memory_growth(scene, before)
    outcome = await scene.send(chat())
    for client in clients:
        client.close()
    return f"{grown} MiB, then {outcome}"


async def leave_answers_unread(scene: Scene) -> str:
    """Request large answers and read none; return memory growth and the next outcome."""
    piece = scripts.chunk(scripts.token("x" * (1 << 16)))

    async def large_answer(call: Call) -> None:
        fields = (b"content-type", scripts.SSE), (b"transfer-encoding", b"chunked")
        await call.send(scripts.head(200, *fields))
        for _ in range(SLOW_MIB << 4):
            await call.send(piece)
        await call.send(scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)

    before = scene.memory()
    scene.answer_with(large_answer)
    clients = []
    for _ in range(SLOW):
        clients.append(await Client.connect(scene.port, limit=1024, rcvbuf=4096))
        await clients[-1].send(chat(stream=True))
    await wait_served(scene, SLOW)
    grown = await memory_growth(scene, before)
    scene.answer_with(scripts.obey("w"))
    outcome = await scene.send(chat())
    for client in clients:
        client.reset()
    return f"{grown} MiB, then {outcome}"


async def memory_growth(scene: Scene, before: int) -> int:
    """Return the growth of the router's memory in MiB, once it is stable."""
    grown, last = scene.memory() - before, -1
    while grown != last:
        await asyncio.sleep(SHORT_TIMEOUT_S / 2)
        grown, last = scene.memory() - before, grown
    return grown


async def wait_served(scene: Scene, count: int) -> None:
    """Wait until the workers have `count` requests and began to answer."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(scene.served()) < count:  # noqa: ASYNC110  # fakes have no event for all
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)


async def send_odd_bodies(scene: Scene) -> str:
    """Count bodies that get a 5xx or no answer; return the count and the slowest time."""
    count, slowest = 0, 0.0
    bodies = [*REFUSED, *(make(ODD_BYTES) for make in HARD.values())]
    for body in bodies:
        sent = time.monotonic()
        outcome = await scene.send(request(body))
        slowest = max(slowest, time.monotonic() - sent)
        count += not outcome.startswith(("2", "4"))
    return f"{count} of {len(bodies)}, {slowest:.2f} s"


async def start_streams(scene: Scene, pieces: int) -> list[asyncio.Task[str]]:
    """Start streams of `pieces` events, fifty per second each."""
    scene.answer_with(scripts.stream(pieces, gap_s=0.02))
    tasks = [asyncio.create_task(scene.send(chat(stream=True))) for _ in range(STREAMS)]
    await wait_served(scene, STREAMS)
    return tasks


async def kill_router(scene: Scene) -> str:
    """Kill and restart the router; return the streams cut off and the time until it serves."""
    tasks = await start_streams(scene, 1000)
    os.killpg(scene.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*tasks)
    scene.answer_with(scripts.obey("w"))
    await asyncio.to_thread(scene.router.stop)
    started = time.monotonic()
    scene.router.start()
    while await scene.send(chat(), SHORT_TIMEOUT_S) != "200":
        if time.monotonic() > started + READY_TIMEOUT_S:
            return "serves no more"
        await asyncio.sleep(0.02)
    return f"{outcomes.count(CUT_OFF)} of {STREAMS}, {time.monotonic() - started:.1f} s"


async def terminate_router(scene: Scene) -> str:
    """Send SIGTERM to the router; count the complete streams."""
    tasks = await start_streams(scene, 100)
    os.kill(scene.pid, signal.SIGTERM)
    outcomes = await asyncio.gather(*tasks)
    return f"{outcomes.count('200')} of {STREAMS}"


async def answer_garbage(scene: Scene) -> str:
    """Count the invalid worker responses that a client sees as an error or as cut off."""
    reported = 0
    for data in GARBAGE.values():
        scene.answer_with(scripts.raw(data, end="close"))
        reported += await scene.send(chat()) not in ("200", "hangs", "not HTTP")
    return f"{reported} of {len(GARBAGE)}"


# By titles, which are keys of the saved JSON.
SCENARIOS: dict[str, Scenario] = {
    "ambiguous requests passed on to a worker": send_ambiguous,
    "a body arrives byte for byte": send_exact_body,
    "a client's kv_transfer_params": send_kv_transfer_params,
    "a worker's stream is reset: the client sees": cut_stream("reset"),
    "a worker's stream is closed: the client sees": cut_stream("close"),
    "a worker's JSON is cut off: the client sees": cut_body,
    "answers that are no HTTP, told as errors": answer_garbage,
    "one of two workers is dead: answered": fail_one(None),
    "one of two resets: answered": fail_one(scripts.reset),
    "one of two says 500: answered": fail_one(scripts.error(500)),
    "one of two says 503: answered": fail_one(scripts.error(503)),
    "one of two says 429: answered": fail_one(scripts.error(429)),
    "one of two hangs: answered within two seconds": fail_one(scripts.stall),
    f"{SLOW} bodies of {SLOW_MIB} MiB that never end take": send_unfinished_bodies,
    f"{SLOW} clients read nothing of {SLOW_MIB} MiB each": leave_answers_unread,
    "of odd bodies answered 5xx or not; the slowest": send_odd_bodies,
    f"killed under {STREAMS} streams: they break off; serves again": kill_router,
    f"SIGTERM under {STREAMS} streams: they come whole": terminate_router,
    "a client leaves its stream: the worker hears of it": disconnect(True),
    "a client leaves before an answer: the worker hears of it": disconnect(False),
}


async def run_scenario(name: str, make: Callable[[list[str]], Worker], scenario: Scenario) -> str:
    """Start one router and two workers, and return the scenario's result."""
    fakes = [FakeWorker(f"w{n}", model=MODEL) for n in range(2)]
    for fake in fakes:
        await fake.listen()
    router = make([fake.url for fake in fakes])
    router.start()
    try:
        await asyncio.to_thread(router.wait_ready)
        scene = Scene(router.port, fakes, router)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while {await scene.send(chat()) for _ in range(4)} != {"200"}:
            if time.monotonic() > deadline:
                return "serves nothing"
            await asyncio.sleep(0.1)
        for fake in fakes:
            fake.calls.clear()
        return await scenario(scene)
    except (AssertionError, ValueError, OSError, TimeoutError) as error:
        return f"{name}: {error!r}"[:COLUMN_WIDTH]
    finally:
        await asyncio.to_thread(router.stop)
        for fake in fakes:
            await fake.stop()


async def main(args: argparse.Namespace) -> dict[str, object]:
    peer_folder = Path(args.folder)
    makers: dict[str, Callable[[list[str]], Worker]] = {}
    with tempfile.TemporaryDirectory() as folder:
        makers["vllm-sched"] = lambda urls: _ours(Path(folder), urls)
        if not args.without_peers:
            await asyncio.to_thread(install, peer_folder)
            for peer in ROUND_ROBIN:
                makers[peer.name] = lambda urls, peer=peer: _peer(peer_folder, peer, urls)  # type: ignore[misc]
        print(" " * TITLE_WIDTH + "".join(f"{name:>{COLUMN_WIDTH}}" for name in makers), flush=True)
        results: dict[str, list[str]] = {}
        for title, scenario in SCENARIOS.items():
            if args.only not in title:
                continue
            cells = [await run_scenario(name, make, scenario) for name, make in makers.items()]
            results[title] = cells
            print(f"{title:<{TITLE_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells),
                  flush=True)  # fmt: skip
    return {"routers": [*makers], "found": results}


def _ours(folder: Path, urls: list[str]) -> Worker:
    port, path = free_port(), folder / "fleet.yaml"
    workers = "".join(f"  - {{name: w{at}, url: '{url}'}}\n" for at, url in enumerate(urls))
    router = f"router: {{port: {port}, admin: {{port: {free_port()}}}}}\n"
    path.write_text(f"model: {MODEL}\nworkers:\n{workers}{router}")
    command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(path)]
    return Worker(
        command, port=port, name="vllm-sched", env=dict(os.environ), deadline_s=READY_TIMEOUT_S
    )


def _peer(folder: Path, peer: Opponent, urls: list[str]) -> Worker:
    port = free_port()
    command = peer.command(peers(folder), urls, (port, free_port()))
    return Worker(
        command, port=port, name=peer.name, env=dict(os.environ), deadline_s=READY_TIMEOUT_S
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    options.add_argument("--folder", default="out/bench-router", help="of the peers' environment")
    options.add_argument("--without-peers", action="store_true")
    options.add_argument("--only", default="", help="run the lines that contain this")
    options.add_argument("--save", help="a JSON file")
    arguments = options.parse_args()
    figures = asyncio.run(main(arguments))
    if arguments.save:
        Path(arguments.save).write_text(json.dumps(figures))

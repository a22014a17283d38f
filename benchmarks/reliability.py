"""What goes wrong, to three routers: ours, vllm-router and sglang-router, side by side.

    python -m benchmarks.reliability

Each is started before two fake workers, anew for each line of the table, with its own defaults. The
peers live in the environment of `benchmarks.router`, which is made if it is not there.
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

READY_S, SOON_S, PATIENCE_S, ASKED = 60.0, 2.0, 8.0, 20
SLOW, SLOW_MIB = 14, 60  # bodies that never end, and what comes of each; or of answers unread
STREAMS, ODD_BYTES = 8, 1 << 20  # that run when a router ends; of a body that is hard to read
NOBODY, TORN = "nobody there", "torn"
NAME_WIDTH, WIDTH = 58, 22
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
        """The router's, and its group's."""
        assert self.router.pid is not None
        return self.router.pid

    def always(self, script: Script) -> None:
        """Let both answer so."""
        for fake in self.fakes:
            fake.always(script)

    def served(self) -> list[Call]:
        """List what clients asked of either."""
        return [call for fake in self.fakes for call in fake.served if call.method == b"POST"]

    def memory(self) -> int:
        """Return what is resident of the router, in MiB."""
        kib = 0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid:
                    status = (path / "status").read_text()
                    kib += int(status.partition("VmRSS:")[2].split()[0])
        return kib >> 10

    async def ask(self, data: bytes, within: float = PATIENCE_S) -> str:
        """Ask once, and say in a word what a client would make of the answer."""
        try:
            client = await Client.connect(self.port)
        except ConnectionError:
            return NOBODY
        try:
            client.writer.write(data)
            answer = await client.answer(within=within)
        except (BrokenError, ConnectionError):
            return TORN
        except TimeoutError:
            return "hangs"
        except (ValueError, AssertionError):
            return "no HTTP"
        finally:
            client.close()
        if answer.status != 200:
            return str(answer.status)
        if answer.all(b"content-type")[:1] == [scripts.SSE] and scripts.DONE not in answer.body:
            return "error event" if b'"error"' in answer.body else "cut, yet looks whole"
        return "200"


Scenario = Callable[[Scene], Awaitable[str]]


async def ambiguous(scene: Scene) -> str:
    """Count the requests that were passed on though nobody can say where they end."""
    cases = list(AMBIGUOUS.values())
    cases += [POST + HOST + CHUNKED + b"\r\n" + chunks for chunks in BAD_CHUNKS.values()]
    passed = 0
    for data in map(wanted, cases):
        before = len(scene.served())
        client = await Client.connect(scene.port)
        with suppress(ConnectionError):
            client.writer.write(data + SMUGGLED)
        with suppress(TimeoutError):
            await client.closed(within=0.5)
        client.close()
        passed += len(scene.served()) > before
    return f"{passed} of {len(cases)}"


def wanted(data: bytes) -> bytes:
    """Make a request one that all three would take, were it not for its framing."""
    data = data.replace(b"/v1/chat/completions", b"/v1/completions").replace(BODY, PROMPT)
    return data.replace(b"\r\n", b"\r\nContent-Type: application/json\r\n", 1)


async def exact(scene: Scene) -> str:
    """Tell whether a body arrives as it was sent."""
    body = b'{"model": "tiny", "x": null, "temperature": 0.70, "messages": '
    body += b'[{"role": "user", "content":"x"}], "y": "\\u00e9"}'
    await scene.ask(request(body))
    return "yes" if any(call.body == body for call in scene.served()) else "no"


async def steers(scene: Scene) -> str:
    """Tell whether a client can name the address that a worker is to connect to."""
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
    await scene.ask(chat(kv_transfer_params=params))
    return "passed" if any(b"remote_host" in call.body for call in scene.served()) else "refused"


def cut(end: str) -> Scenario:
    """Let a stream end early."""

    async def run(scene: Scene) -> str:
        scene.always(scripts.stream(3, gap_s=0.02, end=end))
        return await scene.ask(chat(stream=True))

    return run


async def cut_body(scene: Scene) -> str:
    """Let a JSON body end before its length."""
    scene.always(scripts.raw(HEAD + b'Content-Length: 100\r\n\r\n{"half": ', end="close"))
    return await scene.ask(chat())


def one_fails(script: Script | None) -> Scenario:
    """Let one of the two fail, and count who is answered all the same."""

    async def run(scene: Scene) -> str:
        if script is None:
            await scene.fakes[0].die()
        else:
            scene.fakes[0].always(script)
        heard = [await scene.ask(chat(), SOON_S) for _ in range(ASKED)]
        return f"{heard.count('200')} of {ASKED}"

    return run


def leaves(stream: bool) -> Scenario:
    """Leave, and see whether the worker hears of it."""

    async def run(scene: Scene) -> str:
        scene.always(scripts.stream(1000, gap_s=0.02) if stream else scripts.stall)
        client = await Client.connect(scene.port)
        client.writer.write(chat(stream=stream))
        if stream:
            await client.head(within=PATIENCE_S)
        came = [asyncio.ensure_future(fake.got()) for fake in scene.fakes]
        done, others = await asyncio.wait(came, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        client.close()
        [call] = [each.result() for each in done]
        try:
            async with asyncio.timeout(SOON_S):
                await call.lost.wait()
        except TimeoutError:
            return f"not in {SOON_S:g} s"
        return "yes"

    return run


async def slow_bodies(scene: Scene) -> str:
    """Send many large bodies but for their ends; tell what that takes, and whether it serves."""
    before = scene.memory()
    clients = [await Client.connect(scene.port) for _ in range(SLOW)]
    head = POST + HOST + b"Content-Length: %d\r\n\r\n"
    for client in clients:
        with suppress(ConnectionError, TimeoutError):
            await client.send(wanted(head % (SLOW_MIB + 1 << 20)))
            for _ in range(SLOW_MIB):
                await client.send(b" " * (1 << 20))
    grown = await growth(scene, before)
    heard = await scene.ask(chat())
    for client in clients:
        client.close()
    return f"{grown} MiB, then {heard}"


async def slow_readers(scene: Scene) -> str:
    """Ask for large answers and read none; tell what that takes, and whether it serves."""
    piece = scripts.chunk(scripts.token("x" * (1 << 16)))

    async def torrent(call: Call) -> None:
        lead = (b"content-type", scripts.SSE), (b"transfer-encoding", b"chunked")
        await call.send(scripts.head(200, *lead))
        for _ in range(SLOW_MIB << 4):
            await call.send(piece)
        await call.send(scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)

    before = scene.memory()
    scene.always(torrent)
    clients = []
    for _ in range(SLOW):
        clients.append(await Client.connect(scene.port, limit=1024, rcvbuf=4096))
        await clients[-1].send(chat(stream=True))
    await served(scene, SLOW)
    grown = await growth(scene, before)
    scene.always(scripts.obey("w"))
    heard = await scene.ask(chat())
    for client in clients:
        client.reset()
    return f"{grown} MiB, then {heard}"


async def growth(scene: Scene, before: int) -> int:
    """Wait until the router grows no more; return by how much it did."""
    grown, seen = scene.memory() - before, -1
    while grown != seen:
        await asyncio.sleep(SOON_S / 2)
        grown, seen = scene.memory() - before, grown
    return grown


async def served(scene: Scene, count: int) -> None:
    """Wait until so many requests are at the workers, and a little for what they begin to say."""
    async with asyncio.timeout(PATIENCE_S):
        while len(scene.served()) < count:  # noqa: ASYNC110  # fakes have no event for all
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)


async def odd_bodies(scene: Scene) -> str:
    """Count bodies that are told a 5xx or nothing, and tell how long the slowest took."""
    found, slowest = 0, 0.0
    bodies = [*REFUSED, *(make(ODD_BYTES) for make in HARD.values())]
    for body in bodies:
        began = time.monotonic()
        heard = await scene.ask(request(body))
        slowest = max(slowest, time.monotonic() - began)
        found += not heard.startswith(("2", "4"))
    return f"{found} of {len(bodies)}, {slowest:.2f} s"


async def streaming(scene: Scene, pieces: int) -> list[asyncio.Task[str]]:
    """Have streams run, each of so many pieces, fifty in a second."""
    scene.always(scripts.stream(pieces, gap_s=0.02))
    tasks = [asyncio.create_task(scene.ask(chat(stream=True))) for _ in range(STREAMS)]
    await served(scene, STREAMS)
    return tasks


async def killed(scene: Scene) -> str:
    """Kill the router and start it again; tell whose streams broke off, and when it served."""
    tasks = await streaming(scene, 1000)
    os.killpg(scene.pid, signal.SIGKILL)
    ends = await asyncio.gather(*tasks)
    scene.always(scripts.obey("w"))
    await asyncio.to_thread(scene.router.stop)
    began = time.monotonic()
    scene.router.start()
    while await scene.ask(chat(), SOON_S) != "200":
        if time.monotonic() > began + READY_S:
            return "serves no more"
        await asyncio.sleep(0.02)
    return f"{ends.count(TORN)} of {STREAMS}, {time.monotonic() - began:.1f} s"


async def told_to_go(scene: Scene) -> str:
    """Have the router end as an orchestrator does; count the streams that came whole."""
    tasks = await streaming(scene, 100)
    os.kill(scene.pid, signal.SIGTERM)
    ends = await asyncio.gather(*tasks)
    return f"{ends.count('200')} of {STREAMS}"


async def garbage(scene: Scene) -> str:
    """Count the nonsense that a client is told of as an error, or as broken."""
    told = 0
    for data in GARBAGE.values():
        scene.always(scripts.raw(data, end="close"))
        told += await scene.ask(chat()) not in ("200", "hangs", "no HTTP")
    return f"{told} of {len(GARBAGE)}"


TABLE: dict[str, Scenario] = {
    "ambiguous requests passed on to a worker": ambiguous,
    "a body arrives byte for byte": exact,
    "a client's kv_transfer_params": steers,
    "a worker's stream is reset: the client sees": cut("reset"),
    "a worker's stream is closed: the client sees": cut("close"),
    "a worker's JSON is cut off: the client sees": cut_body,
    "answers that are no HTTP, told as errors": garbage,
    "one of two workers is dead: answered": one_fails(None),
    "one of two resets: answered": one_fails(scripts.reset),
    "one of two says 500: answered": one_fails(scripts.error(500)),
    "one of two says 503: answered": one_fails(scripts.error(503)),
    "one of two says 429: answered": one_fails(scripts.error(429)),
    "one of two hangs: answered within two seconds": one_fails(scripts.stall),
    f"{SLOW} bodies of {SLOW_MIB} MiB that never end take": slow_bodies,
    f"{SLOW} clients read nothing of {SLOW_MIB} MiB each": slow_readers,
    "of odd bodies answered 5xx or not; the slowest": odd_bodies,
    f"killed under {STREAMS} streams: they break off; serves again": killed,
    f"SIGTERM under {STREAMS} streams: they come whole": told_to_go,
    "a client leaves its stream: the worker hears of it": leaves(True),
    "a client leaves before an answer: the worker hears of it": leaves(False),
}


async def play(name: str, make: Callable[[list[str]], Worker], scenario: Scenario) -> str:
    """Start one router before two workers, and let one thing go wrong."""
    fakes = [FakeWorker(f"w{n}", model=MODEL) for n in range(2)]
    for fake in fakes:
        await fake.listen()
    router = make([fake.url for fake in fakes])
    router.start()
    try:
        await asyncio.to_thread(router.wait_ready)
        scene = Scene(router.port, fakes, router)
        give_up = time.monotonic() + READY_S
        while {await scene.ask(chat()) for _ in range(4)} != {"200"}:
            if time.monotonic() > give_up:
                return "serves nothing"
            await asyncio.sleep(0.1)
        for fake in fakes:
            fake.calls.clear()
        return await scenario(scene)
    except (AssertionError, ValueError, OSError, TimeoutError) as error:
        return f"{name}: {error!r}"[:WIDTH]
    finally:
        await asyncio.to_thread(router.stop)
        for fake in fakes:
            await fake.stop()


async def main(given: argparse.Namespace) -> dict[str, object]:
    """Fill the table."""
    place = Path(given.folder)
    makers: dict[str, Callable[[list[str]], Worker]] = {}
    with tempfile.TemporaryDirectory() as folder:
        makers["vllm-sched"] = lambda urls: _ours(Path(folder), urls)
        if not given.without_peers:
            await asyncio.to_thread(install, place)
            for peer in ROUND_ROBIN:
                makers[peer.name] = lambda urls, peer=peer: _peer(place, peer, urls)  # type: ignore[misc]
        print(" " * NAME_WIDTH + "".join(f"{name:>{WIDTH}}" for name in makers), flush=True)
        found: dict[str, list[str]] = {}
        for line, scenario in TABLE.items():
            if given.only not in line:
                continue
            found[line] = [await play(name, make, scenario) for name, make in makers.items()]
            print(f"{line:<{NAME_WIDTH}}" + "".join(f"{each:>{WIDTH}}" for each in found[line]),
                  flush=True)  # fmt: skip
    return {"routers": [*makers], "found": found}


def _ours(folder: Path, urls: list[str]) -> Worker:
    port, path = free_port(), folder / "fleet.yaml"
    workers = "".join(f"  - {{name: w{at}, url: '{url}'}}\n" for at, url in enumerate(urls))
    router = f"router: {{port: {port}, admin: {{port: {free_port()}}}}}\n"
    path.write_text(f"model: {MODEL}\nworkers:\n{workers}{router}")
    command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(path)]
    return Worker(command, port=port, name="vllm-sched", env=dict(os.environ), deadline_s=READY_S)


def _peer(place: Path, peer: Opponent, urls: list[str]) -> Worker:
    port = free_port()
    command = peer.command(peers(place), urls, (port, free_port()))
    return Worker(command, port=port, name=peer.name, env=dict(os.environ), deadline_s=READY_S)


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    options.add_argument("--folder", default="out/bench-router", help="with the peers' environment")
    options.add_argument("--without-peers", action="store_true")
    options.add_argument("--only", default="", help="lines that have this in them")
    options.add_argument("--save", help="a JSON file")
    arguments = options.parse_args()
    figures = asyncio.run(main(arguments))
    if arguments.save:
        Path(arguments.save).write_text(json.dumps(figures))

"""Count lost and repeated tokens of streams whose workers are killed again and again.

Fake workers generate a numbered text. Every few seconds one of them resets its connections, as a
process that is killed does, and serves again; with --drain it is drained at once instead, until it
has no stream. Each client gets the whole text once, or the stream counts as lost. The router is the
real one, with fake journals.

    python -m benchmarks.continued_streams [--streams 2000] [--workers 8] [--seconds 300] [--drain]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from proxy.core.fleet.worker import Worker
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, Connection, PeerGoneError
from tests.proxy.wire.raw_client import BrokenError, chat
from tests.proxy.wire.site import Fake, Site

GAP_S = 1.0


class FakeEngines:
    """Workers that generate the words 0, 1, 2, ..., and their journals."""

    def __init__(self, words: int) -> None:
        self.words = words
        self.published: dict[str, list[int]] = {}
        self.killed: set[Connection] = set()

    async def serve(self, call: Call) -> None:
        request_id = call.all(b"x-request-id")[0].decode()
        so_far = call.json().get("vllm_xargs", {}).get("output_so_far", [])
        text = "".join(map(word, so_far))
        try:
            await call.send(scripts.STREAM_HEAD)
            for number in range(len(so_far), self.words):
                self.published[request_id] = [*range(number + 1)]
                await call.send(scripts.chunk(scripts.token(text + word(number))))
                text = ""
                await asyncio.sleep(GAP_S)
                if call.connection in self.killed:
                    return
            self.published.pop(request_id, None)
            if text:  # the engine had ended
                await call.send(scripts.chunk(scripts.token(text)))
            await call.send(scripts.chunk(FINISH) + scripts.chunk(scripts.DONE) + b"0\r\n\r\n")
        except PeerGoneError:
            return

    def tokens(self, _: Worker, request_id: str, __: float) -> list[int] | None:
        return self.published.get(request_id)


FINISH = scripts.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


def word(number: int) -> str:
    return f"{number} "


def pieces(body: bytes) -> Iterator[str]:
    for event in body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data.startswith(b"{"):
            for choice in json.loads(data).get("choices", ()):
                yield choice["delta"].get("content", "")


async def client(
    site: Site, engines: FakeEngines, ends: Counter[str], until: float, delay_s: float
) -> None:
    """Send one stream after the other, the first after a delay."""
    await asyncio.sleep(delay_s)
    whole = "".join(map(word, range(engines.words)))
    while time.monotonic() < until:
        try:
            answer = await site.ask(chat(stream=True), within=600)
            text = "".join(pieces(answer.body))
            if text == whole:
                ends["whole"] += 1
            elif whole.startswith(text):
                ends["lost"] += 1
            else:
                ends["wrong"] += 1
        except (BrokenError, OSError):
            ends["lost"] += 1


async def kill(site: Site, engines: FakeEngines, every_s: float, until: float, seed: int) -> int:
    """Reset all connections of one worker after the other; return how often."""
    fakes = list(site.fakes.values())
    random.Random(seed).shuffle(fakes)
    for count, fake in enumerate(itertools.cycle(fakes)):
        await asyncio.sleep(every_s)
        if time.monotonic() >= until:
            return count
        for connection in list(fake.open):
            engines.killed.add(connection)
            connection.reset()
    raise AssertionError


async def drain(site: Site, every_s: float, until: float, seed: int) -> list[float]:
    """Drain one worker after the other at once; return the seconds until each was empty."""
    names, took = list(site.fakes), []
    random.Random(seed).shuffle(names)
    for name in itertools.cycle(names):
        await asyncio.sleep(every_s)
        begun = time.monotonic()
        if begun >= until:
            break
        site.fleet.roster.drain(name)
        while site.worker(name).requests:
            await site.wire.moves.move_all(name)
        took.append(time.monotonic() - begun)
        site.fleet.roster.drain(name, draining=False)
    return took


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    site = Site({"max_attempts": arguments.attempts, "retry_budget": 1.0}, {})
    await site.start(tuple(Fake(f"w{number}") for number in range(arguments.workers)))
    engines = FakeEngines(arguments.words)
    site.fleet.roster.stream_tokens = engines.tokens
    for name, fake in site.fakes.items():
        site.worker(name).reports_prefixes = True
        fake.always(engines.serve)
    ends: Counter[str] = Counter()
    until = time.monotonic() + arguments.seconds
    lasts_s, streams = arguments.words * GAP_S, arguments.streams
    clients = [
        client(site, engines, ends, until, lasts_s * number / streams) for number in range(streams)
    ]
    every_s, seed = arguments.every, arguments.seed
    faults: dict[str, Any] = {}
    if arguments.drain:
        *_, took = await asyncio.gather(*clients, drain(site, every_s, until, seed))
        faults = {"drains": len(took), "slowest drain, s": round(max(took), 2)}
    else:
        *_, kills = await asyncio.gather(*clients, kill(site, engines, every_s, until, seed))
        faults = {"kills": kills}
    continued = sum(site.metrics.continuations.values())
    await site.settled()
    await site.stop()
    return {**faults, "continued": continued, **ends, "not continued": dict(
        site.metrics.lost_streams
    )}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000, help="at once")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--words", type=int, default=20, help="tokens of a response, one a second")
    parser.add_argument("--attempts", type=int, default=10, help="router.retries.attempts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drain", action="store_true", help="drain workers instead of killing")
    result = asyncio.run(run(parser.parse_args()))
    Console().print(result)
    lost = result.get("lost", 0) + result.get("wrong", 0)
    Console().print(f"0 lost or repeated: {'met' if not lost else 'MISSED'}")


if __name__ == "__main__":
    main()

"""Kill the process behind a real worker's address again and again, and compare the streams.

    python -m benchmarks.killed_streams [--kills 200] [--clients 8]

Two real vLLM workers run the tiny model. The router reaches the HTTP port and the journal of each
through a relay process. SIGKILL ends a relay with all its connections, and new ones are refused
until it runs again: the router sees the death of a worker. The engine itself stays, because a start
takes most of a minute; it aborts its requests. The next kill comes at a random moment after the
router uses both workers again, and reads both journals.

Each greedy stream must have the text, reason and usage that it had without kills.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final

import aiohttp
import openai
import yaml
from rich.console import Console

from benchmarks.agents.real import ARGS, MODEL, running
from vllm_sched.bench.results.stats import percentile
from vllm_sched.workers.launch import free_port

WORDS: Final = ("one", "two", "three", "four", "quick", "brown", "fox")
NAMES: Final = "w0", "w1"
DOWN_S: Final = 0.5  # between a kill and the relay's next start; the router notes the end
READY_TIMEOUT_S: Final = 60.0
EQUAL, DIFFERENT, FAILED = "equal", "different", "ended with an error"
READY: Final = re.compile(
    r"^proxy_(?:journal_up|worker_up)\{.*\} 1$|^proxy_worker_breaker_open\{.*\} 0$", re.MULTILINE
)
LOST: Final = re.compile(
    r'^proxy_streams_not_continued_total\{why="(\w+)"\} ([1-9]\d*)$', re.MULTILINE
)
CONTINUED: Final = re.compile(r"^proxy_continued_streams_total\{.*\} (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ports:
    """Those of a worker and of its journal, and those of their relay."""

    server: int = field(default_factory=free_port)
    journal: int = field(default_factory=free_port)
    relay: int = field(default_factory=free_port)
    journal_relay: int = field(default_factory=free_port)


@dataclass(frozen=True, slots=True)
class Streamed:
    """How a stream ended, and its longest pause after the first piece."""

    answer: tuple[str, str | None, int]  # text, reason, output tokens
    pause_s: float
    paused_until: float
    error: str = ""


@dataclass
class Tally:
    ends: Counter[str] = field(default_factory=Counter)
    streams: dict[str, Streamed] = field(default_factory=dict)  # that ended well, by request id
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)  # of all requests
    errors: Counter[str] = field(default_factory=Counter)
    kills: list[float] = field(default_factory=list)  # when
    over: bool = False


def engines_file(ports: Sequence[Ports], admin: int, *, caches: bool) -> str:
    """Return the fleet file that starts both workers, on a processor each if there are two."""
    args = [*ARGS] if caches else [*ARGS, "--no-enable-prefix-caching"]
    cpus = cycle(sorted(os.sched_getaffinity(0)))
    workers = [
        {
            "name": name,
            "url": f"http://127.0.0.1:{worker_ports.server}",
            "journal": f"tcp://127.0.0.1:{worker_ports.journal}",
            "launch": {"args": args, "policies": {}, "cpus": [cpu]},
        }
        for name, worker_ports, cpu in zip(NAMES, ports, cpus, strict=False)
    ]
    router = {"port": free_port(), "admin": {"port": admin}}
    return yaml.safe_dump({"model": MODEL, "workers": workers, "router": router})


def router_file(ports: Sequence[Ports], port: int, admin: int) -> str:
    """Return the fleet file of the router that reaches both workers through relays."""
    workers = [
        {
            "name": name,
            "url": f"http://127.0.0.1:{worker_ports.relay}",
            "journal": f"tcp://127.0.0.1:{worker_ports.journal_relay}",
        }
        for name, worker_ports in zip(NAMES, ports, strict=True)
    ]
    router = {"port": port, "admin": {"port": admin}, "retries": {"budget": 1.0, "attempts": 10}}
    return yaml.safe_dump({"model": MODEL, "workers": workers, "router": router})


async def start_relay(ports: Ports) -> asyncio.subprocess.Process:
    pairs = f"{ports.relay}:{ports.server}", f"{ports.journal_relay}:{ports.journal}"
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.fleet.relay", *pairs)


async def fetch(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.text()


async def wait_both_usable(port: int) -> None:
    """Wait until the router reads both journals and sends requests to both workers."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while len(READY.findall(await fetch(f"http://127.0.0.1:{port}/metrics"))) < 3 * len(NAMES):
        if time.monotonic() > deadline:
            raise TimeoutError("the router does not use both workers")
        await asyncio.sleep(0.1)


def make_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the fields of requests that continue exactly, each second one a chat."""
    rng, prompts = random.Random(args.seed), []
    for number in range(args.prompts):
        words = " ".join(rng.choices(WORDS, k=rng.randrange(1, args.words)))
        fields: dict[str, Any] = {"prompt": words}
        if number % 2:
            fields = {"messages": [{"role": "user", "content": words}]}
        fields["extra_body"] = {"ignore_eos": True}
        if number % 3 == 0:
            fields["extra_body"] |= {"repetition_penalty": 1.2}
        prompts.append(fields)
    return prompts


async def stream(
    client: openai.AsyncOpenAI, fields: dict[str, Any], tokens: int, request_id: str
) -> Streamed:
    """Send a greedy stream."""
    chat = "messages" in fields
    create: Any = client.chat.completions.create if chat else client.completions.create
    text, reason, used, last_at, pause_s, until = "", None, 0, 0.0, 0.0, 0.0
    try:
        async for event in await create(
            model=MODEL, max_tokens=tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_headers={"X-Request-Id": request_id},
            **fields,
        ):  # fmt: skip
            now = time.monotonic()
            if last_at and now - last_at > pause_s:
                pause_s, until = now - last_at, now
            last_at = now
            if event.usage is not None:
                used = event.usage.completion_tokens
            for choice in event.choices:
                text += (choice.delta.content if chat else choice.text) or ""
                reason = choice.finish_reason or reason
    except openai.OpenAIError as error:
        return Streamed((text, reason, used), pause_s, until, str(error))
    return Streamed((text, reason, used), pause_s, until)


@dataclass(slots=True)
class Trial:
    """The clients of a router, and the relays that are killed behind it."""

    args: argparse.Namespace
    ports: Sequence[Ports]
    relays: list[asyncio.subprocess.Process]
    port: int  # of the router
    admin: int
    client: openai.AsyncOpenAI
    tally: Tally = field(default_factory=Tally)

    async def run(self) -> None:
        await wait_both_usable(self.port)
        prompts, numbers = make_prompts(self.args), count()
        whole = await self._play_whole(prompts)
        plays = (self._play(prompts, whole, numbers) for _ in range(self.args.clients))
        await asyncio.gather(self._kill(), *plays)
        await self._note_decisions()

    async def _play_whole(self, prompts: Sequence[dict[str, Any]]) -> list[Streamed]:
        """Return the stream of each prompt without kills."""
        whole: list[Streamed] = []
        for at in range(0, len(prompts), self.args.clients):
            sent = (
                stream(self.client, prompt, self.args.tokens, f"whole-{at}-{n}")
                for n, prompt in enumerate(prompts[at : at + self.args.clients])
            )
            whole += await asyncio.gather(*sent)
        if errors := [streamed.error for streamed in whole if streamed.error]:
            raise RuntimeError(errors[0])
        return whole

    async def _play(
        self, prompts: Sequence[dict[str, Any]], whole: Sequence[Streamed], numbers: count[int]
    ) -> None:
        """Send one stream after the other, and compare each with the one without kills."""
        tally = self.tally
        while not tally.over:
            number = next(numbers)
            request_id, which = f"killed-{number}", number % len(prompts)
            streamed = await stream(self.client, prompts[which], self.args.tokens, request_id)
            if streamed.error:
                tally.ends[FAILED] += 1
                tally.errors[streamed.error] += 1
                continue
            tally.ends[EQUAL if streamed.answer == whole[which].answer else DIFFERENT] += 1
            tally.streams[request_id] = streamed

    async def _kill(self) -> None:
        """Kill one relay after the other at random moments."""
        args, tally, rng = self.args, self.tally, random.Random(self.args.seed)
        until = time.monotonic() + 60 * args.minutes
        try:
            while len(tally.kills) < args.kills and time.monotonic() < until:
                await wait_both_usable(self.port)
                await asyncio.sleep(rng.uniform(0, 2 * args.every))
                which = rng.randrange(len(self.relays))
                self.relays[which].kill()
                tally.kills.append(time.monotonic())
                await self.relays[which].wait()
                await asyncio.sleep(DOWN_S)
                self.relays[which] = await start_relay(self.ports[which])
                await self._note_decisions()
        finally:
            tally.over = True

    async def _note_decisions(self) -> None:
        rows = await fetch(f"http://127.0.0.1:{self.admin}/admin/decisions?limit=200")
        self.tally.decisions |= {row["id"]: row for row in json.loads(rows)}


async def measure(args: argparse.Namespace) -> tuple[Tally, str]:
    """Return what the clients saw, and the router's metrics."""
    ports, port, admin, up_admin = [Ports(), Ports()], free_port(), free_port(), free_port()
    engines = engines_file(ports, up_admin, caches=not args.no_caches)
    relays = [await start_relay(worker_ports) for worker_ports in ports]
    try:
        with tempfile.TemporaryDirectory() as name:
            async with (
                running(Path(name), "up", engines, up_admin),
                running(Path(name), "router", router_file(ports, port, admin), admin),
                openai.AsyncOpenAI(
                    base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
                ) as client,
            ):
                trial = Trial(args, ports, relays, port, admin, client)
                await trial.run()
                return trial.tally, await fetch(f"http://127.0.0.1:{port}/metrics")
    finally:
        for relay in relays:
            relay.kill()
            await relay.wait()


def quantiles(values: Sequence[float], unit: str) -> str:
    if not values:
        return "none"
    return ", ".join(
        f"p{percent} {percentile(values, percent):.2f}{unit}" for percent in (50, 90, 99, 100)
    )


def kill_of(tally: Tally, name: str) -> int:
    """Return the number of the last kill before a stream's longest pause ended."""
    return bisect(tally.kills, tally.streams[name].paused_until)


def since_kill(tally: Tally, name: str) -> float:
    """Return the part of a stream's longest pause that came after the kill."""
    stream = tally.streams[name]
    killed_at = tally.kills[kill_of(tally, name) - 1]
    return min(stream.pause_s, stream.paused_until - killed_at)


def predicted_together(tally: Tally) -> dict[int, float]:
    """Return for each kill the predicted time until all moved streams are prefilled.

    The engine prefills them in the same steps, and a prediction contains only the earlier ones.
    """
    longest: dict[int, float] = {}
    for name, row in tally.decisions.items():
        if name in tally.streams and row["left_workers"]:
            kill = kill_of(tally, name)
            longest[kill] = max(longest.get(kill, 0.0), row["predicted_ttft_s"] or 0.0)
    return longest


def report(console: Console, tally: Tally, page: str) -> None:
    continued = sum(map(int, CONTINUED.findall(page)))
    console.print(
        f"{len(tally.kills)} kills, {sum(tally.ends.values())} streams: {dict(tally.ends)}"
    )
    console.print(f"continued {continued} times; not continued: {dict(LOST.findall(page))}")
    for error, number in tally.errors.most_common():
        console.print(f"{number} ended with: {error}")
    together = predicted_together(tally)
    rows = {name: row for name, row in tally.decisions.items() if name in tally.streams}
    for title, moves in (("once", [1]), ("more often", range(2, 1000))):
        names = [name for name, row in rows.items() if len(row["left_workers"]) in moves]
        pauses = [since_kill(tally, name) for name in names]
        console.print(
            f"pause of {len(names)} streams continued {title}, from the kill: "
            + quantiles(pauses, " s")
        )
        own = [rows[name]["predicted_ttft_s"] for name in names]
        of_all = [together[kill_of(tally, name)] for name in names]
        for what, predicted in (("its own", own), ("all that moved with it", of_all)):
            pairs = zip(pauses, predicted, strict=True)
            shares = [pause / prefill_s for pause, prefill_s in pairs if prefill_s]
            console.print(f"... over the predicted prefill of {what}: {quantiles(shares, 'x')}")
    others = [name for name, row in rows.items() if not row["left_workers"]]
    longest = [tally.streams[name].pause_s for name in others]
    console.print(f"longest pause of {len(others)} other streams: {quantiles(longest, ' s')}")
    whole = [rows[name] for name in others if rows[name]["predicted_ttft_s"]]
    shares = [row["ttft_s"] / row["predicted_ttft_s"] for row in whole]
    console.print(f"... their first token over the predicted prefill: {quantiles(shares, 'x')}")
    missed = tally.ends[DIFFERENT]
    console.print(f"every stream that ended is equal: {'MISSED' if missed else 'met'}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="killed_streams", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=15.0, help="at most")
    parser.add_argument(
        "--every", type=float, default=1.5, help="mean seconds, besides the wait, until a kill"
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--words", type=int, default=300, help="of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=200, help="of a response")
    parser.add_argument(
        "--no-caches", action="store_true", help="engines compute each prompt, cached or not"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    tally, page = asyncio.run(measure(args))
    report(Console(), tally, page)
    return int(tally.ends[DIFFERENT] > 0)


if __name__ == "__main__":
    sys.exit(main())

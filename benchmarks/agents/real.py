"""Play small sessions with OpenAI's client on two real workers behind two routers.

    python -m benchmarks.agents.real --sessions 6 --turns 5 --rounds 2

`vllm-sched up` starts two workers of the tiny model on this machine's processors and a router with
the product's defaults. A second router in front of the same workers chooses in turn. The routers
take turns, each first in every other round, with sessions of the same sizes and think times, in
closed loop. Nothing else should run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import openai
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.soak_engines import READY_TIMEOUT_S, wait_both_up
from vllm_sched.bench.client.text import Texts
from vllm_sched.bench.results.stats import percentile
from vllm_sched.workers.launch import free_port

OURS, IN_TURN = "ours", "round robin"
MODEL: Final = "tiny"
ARGS: Final = (
    "--max-model-len=16384", "--max-num-batched-tokens=512", "--enable-prompt-tokens-details"
)  # fmt: skip
FIRST_WORDS: Final = (1_000, 2_000)  # about three tokens each
TURN_WORDS: Final = (20, 200)
OUTPUT_TOKENS: Final = (8, 32)
THINK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Turn:
    number: int
    ttft_s: float
    prompt: int
    cached: int


@dataclass(frozen=True, slots=True)
class Played:
    turns: list[Turn]
    tasks_s: list[float]


def fleet_file(ports: Sequence[int], router: int, admin: int, policy: str | None) -> str:
    """Return a fleet file; with a policy, for a router in front of workers that run already."""
    workers: list[dict[str, Any]] = [
        {"name": f"w{n}", "url": f"http://127.0.0.1:{port}"} for n, port in enumerate(ports)
    ]
    if policy is None:
        for worker in workers:
            worker["launch"] = {"args": list(ARGS), "policies": {"long_prompt": {}}}
    content: dict[str, Any] = {
        "model": MODEL, "workers": workers, "router": {"port": router, "admin": {"port": admin}}
    }  # fmt: skip
    if policy is not None:
        content["routing"] = {"policy": policy}
    return yaml.safe_dump(content)


@asynccontextmanager
async def running(folder: Path, command: str, fleet: str, admin: int) -> AsyncIterator[None]:
    """Run `vllm-sched up` or `router` for a while."""
    path = folder / f"{command}.yaml"
    path.write_text(fleet)
    with (folder / f"{command}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vllm_sched.cli.main", command, str(path), stdout=log, stderr=log
        )
    try:
        if not await wait_both_up(admin, READY_TIMEOUT_S):
            raise RuntimeError((folder / f"{command}.log").read_text()[-3000:])
        yield
    finally:
        process.terminate()
        await process.wait()


async def session(
    client: openai.AsyncOpenAI, side: str, part: str, turns: int, seed: int
) -> tuple[list[Turn], float]:
    """Play one session; return its turns and its time."""
    rng, texts, began = random.Random(f"{seed}/{part}"), Texts(seed), time.monotonic()
    name = f"{side}/{part}"  # equal sizes for each side, and other words
    messages: list[Any] = []
    done = []
    for number in range(turns):
        words = rng.randint(*(TURN_WORDS if number else FIRST_WORDS))
        messages.append({"role": "user", "content": texts.text(f"{name}/{number}", words)})
        sent, first, answer, usage = time.monotonic(), 0.0, "", None
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=rng.randint(*OUTPUT_TOKENS), stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            extra_headers={"X-Session-Id": name},
        )  # fmt: skip
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic()
                answer += chunk.choices[0].delta.content
        assert usage is not None
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens if details else 0) or 0
        done.append(Turn(number, (first or time.monotonic()) - sent, usage.prompt_tokens, cached))
        messages.append({"role": "assistant", "content": answer})
        await asyncio.sleep(THINK_S * rng.random())
    return done, time.monotonic() - began


async def play(port: int, side: str, parts: Sequence[str], turns: int, seed: int) -> Played:
    """Play sessions at once through a router."""
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        ended = await asyncio.gather(*(session(client, side, part, turns, seed) for part in parts))
    return Played(
        [turn for session_turns, _ in ended for turn in session_turns], [took for _, took in ended]
    )


def table(by_side: dict[str, Played]) -> Table:
    """Return the figures; those of turns leave the first ones out."""
    headings = "", "TTFT p50", "TTFT p90", "hits", "task p50", "task p90"
    layout = Table(*headings, box=box.MARKDOWN)
    for side, played in by_side.items():
        later = [turn for turn in played.turns if turn.number]
        ttfts = [turn.ttft_s * 1000 for turn in later]
        layout.add_row(
            side,
            *(f"{percentile(ttfts, percent):.0f} ms" if later else "-" for percent in (50, 90)),
            f"{fmean(turn.cached / turn.prompt for turn in later):.1%}" if later else "-",
            *(f"{percentile(played.tasks_s, percent):.2f} s" for percent in (50, 90)),
        )
    return layout


async def compare(args: argparse.Namespace) -> dict[str, Played]:
    """Return what each router's sessions took."""
    ports = [free_port(), free_port()]
    routers = {OURS: (free_port(), free_port()), IN_TURN: (free_port(), free_port())}
    by_side = {side: Played([], []) for side in routers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        up = fleet_file(ports, *routers[OURS], policy=None)
        beside = fleet_file(ports, *routers[IN_TURN], policy="round_robin")
        async with (
            running(folder, "up", up, routers[OURS][1]),
            running(folder, "router", beside, routers[IN_TURN][1]),
        ):
            for number in range(args.rounds):
                parts = [f"{number}/{part}" for part in range(args.sessions)]
                for side in sorted(routers, reverse=bool(number % 2)):
                    played = await play(routers[side][0], side, parts, args.turns, args.seed)
                    by_side[side].turns.extend(played.turns)
                    by_side[side].tasks_s.extend(played.tasks_s)
    return by_side


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agents.real", description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=6, help="at once")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if min(args.sessions, args.turns, args.rounds) < 1:
        parser.error("--sessions, --turns, --rounds: must be 1 or more")
    Console().print(table(asyncio.run(compare(args))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

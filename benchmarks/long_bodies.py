"""Measure the router's core with prompts of up to a million tokens.

    python -m benchmarks.long_bodies [--sessions 10000]

Memory is that of the prefix index after sessions of 300,000 tokens, each of 20 turns that extend
the last prompt. Steps are those between which the event loop serves other requests: the longest one
is how long a body blocks them. Times are of the processor, the best of `ROUNDS`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from proxy.compiled.locate import in_use
from proxy.core.fleet.charges import idle_fleet
from proxy.core.fleet.leases import Lease
from proxy.core.learned.prefix_index import BLOCKS, ENDS, PrefixIndex
from proxy.core.model.role import Role
from proxy.core.model.route_table import Route
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, ReceivedRequest, RequestInfo
from proxy.core.request.json_body import LargeBody
from proxy.core.request.route_lookup import find
from proxy.core.router import Router, RouterSettings

SESSIONS, TURNS, TOKENS, BYTES_PER_TOKEN, WORKERS = 10_000, 20, 300_000, 4, 64
SIZES = (400_000, 1_000_000, 3_000_000, 4_000_000)
ROUNDS = 7
MODEL, MAX_TOKENS = "tiny", 10_000_000
CODE = 'def f(self, x):\n    if x == "a":\n        return "b\\n" + x\n\n'
MAX_MEMORY_MB, MAX_STEP_MS = 200, 20
MEGA, MILLI, MICRO = 1e-6, 1e3, 1e6
TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Edit a file. " * 40,
        "parameters": {
            "type": "object",
            "properties": {f"p{n}": {"type": "string", "enum": ["a", "b"]} for n in range(20)},
        },
    },
}


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def index_bytes(sessions: int, moves: int = 0) -> tuple[float, int]:
    """Return the memory of an index, and how many sessions it knows to their ends.

    `moves`: how often each session goes to another worker.
    """
    index, blocks = PrefixIndex(), sum(end <= TOKENS * BYTES_PER_TOKEN for end in ENDS)
    system = tuple(random.Random(0).getrandbits(64) for _ in range(40))

    def prompt(session: int) -> tuple[int, ...]:
        rng = random.Random(session + 1)
        return system + tuple(rng.getrandbits(64) for _ in range(blocks - len(system)))

    gc.collect()
    before = resident_bytes()
    for session in range(sessions):
        whole = prompt(session)
        for turn in range(1, TURNS + 1):
            worker = (session + turn * moves // TURNS) % WORKERS
            index.record(whole[: blocks * turn // TURNS], worker)
    gc.collect()
    held = resident_bytes() - before
    complete = sum(
        index.matches(prompt(session))[0][0] == blocks for session in range(0, sessions, 10)
    )
    return held, complete * 10


def bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """Yield a body of each kind."""

    def chat(messages: list[object], **more: object) -> bytes:
        return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **more}).encode()

    def user(content: object) -> list[object]:
        return [{"role": "user", "content": content}]

    code = len(json.dumps(CODE)) - 2
    turn = {"role": "assistant", "content": CODE * 8}
    image = {"url": "data:image/png;base64," + "QUJD" * (size // 4)}
    yield "text", chat(user("a word and " * (size // 11)))
    yield "code", chat(user(CODE * (size // code)))
    yield "messages of 0.6 KB", chat([turn] * (size // len(json.dumps(turn))))
    tools = min(size, 1_000_000) // len(json.dumps(TOOL))  # more are refused
    yield "tools (up to 1 MB)", chat(user(CODE * ((size - 1) // code)), tools=[TOOL] * tools)
    yield "an image", chat(user([{"type": "image_url", "image_url": image}]))
    yield "Chinese, escaped", chat(user("你好世界今天" * (size // 36)))
    yield "quotes", chat(user('"' * (size // 2)))
    strings = min(size // 6, 190_000)  # more are refused
    yield "strings of 2 bytes (up to 1.1 MB)", chat(user(["ab"] * strings))
    numbers = list(range(100_000, 100_000 + size // 8))
    yield "token ids", json.dumps({"model": MODEL, "prompt": numbers, "max_tokens": 1}).encode()
    yield "NaN", chat(user(CODE * (size // code)), top_p=float("nan"))


def make_router() -> Router:
    specs = (WorkerSpec(f"w{i}", f"http://w{i}", Role.GENERAL, MODEL, MAX_TOKENS) for i in range(4))
    return Router(RouterSettings(), idle_fleet(specs))


def steps_ms(body: bytes) -> list[float]:
    """Return the time of each step: count, mask, count exactly, parse, and place."""
    kind = "completions" if b'"prompt"' in body[:100] else "chat/completions"
    router, route = make_router(), find("POST", f"/v1/{kind}")
    assert isinstance(route, Route)
    best: list[float] = []
    for number in range(ROUNDS):
        large, times, goes_on = LargeBody(body), [], True
        while goes_on:
            begin = time.thread_time()
            goes_on = large.advance()
            times.append(time.thread_time() - begin)
        begin = time.thread_time()
        info = router.read(ReceivedRequest(route, body, b"application/json", "id", large=large))
        if isinstance(info, RequestInfo):
            lease = router.submit(info, number)
            times.append(time.thread_time() - begin)
            assert isinstance(lease, Lease)
            router.leases.finish(lease, number, Outcome.DONE, None)
        best = [*map(min, best, times)] if best else times
    return [seconds * MILLI for seconds in best]


def best_us(work: Callable[[], object]) -> float:
    """Return the best time of a call in microseconds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times) * MICRO


def main() -> None:
    parser = argparse.ArgumentParser(prog="long_bodies", description="measure long prompts")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    sessions = parser.parse_args().sessions
    console = Console()
    console.print("compiled modules" if in_use() else "plain modules")
    for moves in (0, 2):
        held, complete = index_bytes(sessions, moves)
        console.print(
            f"{sessions:,} sessions of {TOKENS:,} tokens, {moves} moves: {held * MEGA:.0f} MB "
            f"(target: {MAX_MEMORY_MB}), {complete:,} known to their ends"
        )
    for size in SIZES:
        index, body = PrefixIndex(), b"a word and " * (size // 11)
        hashes = index.hashes(MODEL, body)
        hashing = best_us(lambda body=body, index=index: index.hashes(MODEL, body))
        index.record(hashes, 0)
        finding = best_us(lambda hashes=hashes, index=index: index.matches(hashes))
        blocks = f"{len(hashes)} blocks of at most {max(BLOCKS[: len(hashes)])} bytes"
        console.print(f"{size:,} bytes: hash {hashing:.0f} us, find {finding:.1f} us, {blocks}")
    table = Table(title=f"longest step in ms (target: {MAX_STEP_MS}), and all steps together")
    for heading in ("", *(f"{size * MEGA:g} MB" for size in SIZES)):
        table.add_column(heading, justify="right" if heading else "left")
    rows: dict[str, list[str]] = {}
    for size in SIZES:
        for kind, body in bodies(size):
            steps = steps_ms(body)
            rows.setdefault(kind, []).append(f"{max(steps):.1f} / {sum(steps):.1f}")
    for kind, cells in rows.items():
        table.add_row(kind, *cells)
    console.print(table)


if __name__ == "__main__":
    main()

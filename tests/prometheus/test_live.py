"""A real Prometheus scrapes routers and workers under load: every panel and rule has data.

Routers and Prometheus are real processes. Workers are fakes with metrics pages from the engine
half's declarations, and with the faults that some panels show.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.prometheus.pages import EnginePage
from tests.prometheus.rare_cases import (
    EMPTY,
    KEY,
    RULES,
    every_route,
    excused_queries,
    queries_of_cases,
)
from tests.prometheus.scene import Scene, fake
from tests.prometheus.server import queries, retry_until_empty
from tests.prometheus.tools import program
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import Faults, Kv
from tests.proxy.wire.pairs import chat_body
from tests.proxy.wire.raw_client import bearer, chat, request
from vllm_sched.workers.launch import free_port

SPLIT = """
model: tiny
workers:
  - {{name: s0, role: short, url: "{s0}", max_requests: 2}}
  - {{name: bad, role: short, url: "{bad}"}}
  - {{name: l0, role: long, url: "{l0}", max_requests: 2}}
  - {{name: idle, role: long, url: "{idle}", journal: "ipc:///nowhere/journal"}}
{silent}
{cases}
discovery:
  kubernetes: {{url: "http://127.0.0.1:{unused}"}}
  pools:
    - {{name: found, role: short, dns: localhost, port: {found_port}, max_requests: 1}}
    - {{name: empty, role: short, selector: app=none}}
routing: {{short_limit: 2000}}
router:
  port: {port}
  admin: {{port: {admin}}}
  probe: {{interval_s: 1}}
  queue: {{max_requests: 20, max_wait_s: 1}}
"""
PAIRS = """
model: tiny
workers:
  - {{name: p0, role: prefill, url: "{p0}", max_requests: 3}}
  - {{name: d0, role: decode, url: "{d0}"}}
  - {{name: d1, role: decode, url: "{d1}"}}
{cases}
transfer: {{connector: nixl}}
tenants:
  - {{name: chat, class: interactive, keys_file: {folder}/keys}}
  - {{name: jobs, keys_env: JOBS_KEY, limits: {{requests_per_minute: 1}}}}
routing: {{disaggregate_above: 1}}
router:
  port: {port}
  admin: {{port: {admin}}}
  probe: {{interval_s: 1}}
  retries: {{budget: 1}}
  batches: {{path: {folder}/batches}}
"""
FLEETS = {"split": SPLIT, "pairs": PAIRS, "rules": RULES}


COMPLETIONS = "/v1/completions"
IN_ONE_PIECE = b'{"model": "tiny", "prompt": "hi", "max_tokens": 4}'
JOBS = "sk-vs-of-jobs-at-night"


async def fail_transfer(call: Call) -> None:
    """Fail legs that fetch blocks, allow releases, and serve whole requests."""
    body = call.json()
    if body["model"] != "tiny":
        await scripts.error(404)(call)
    elif "remote_block_ids" in (body.get("kv_transfer_params") or {}):
        await scripts.error(500)(call)
    else:
        await scripts.stream(6)(call)


class FakeScene(Scene):
    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        super().__init__(folder, session)
        self.kv = Kv()

    async def start(self, stack: AsyncExitStack) -> None:
        page = EnginePage(0.4)
        fakes = {
            name: await fake(stack, name)
            for name in ("s0", "bad", "l0", "idle", "found", "p0", "d0", "d1")
        }
        for worker in fakes.values():
            worker.always(page.script(), "/metrics")
            worker.always(scripts.stream(6, gap_s=0.02, with_usage=True))
        fakes["bad"].always(scripts.error(500))
        for name in ("s0", "l0", "found"):
            fakes[name].always(scripts.answer(), COMPLETIONS)
        for name in ("p0", "d0", "d1"):
            fakes[name].always(self.kv.worker(fakes[name], "prefill" if name == "p0" else "decode"))
        (self.folder / "keys").write_text(KEY)
        values = {name: worker.url for name, worker in fakes.items()}
        values |= {"found_port": str(fakes["found"].port), "unused": str(free_port())}
        ports = [worker.port for worker in fakes.values()]
        await self.begin(stack, FLEETS, values, ports, JOBS_KEY=JOBS)

    async def send_all(self, number: int) -> None:
        """Send each route, short and long requests, refused and failing ones."""
        # First, because the queue is soon full.
        requests: list[Awaitable[None]] = [
            self.send(self.split, request(IN_ONE_PIECE, path=COMPLETIONS))
        ]
        requests += [self.send(self.split, data) for data in every_route(stream=True)]
        requests += [self.send(self.split, chat("x" * 200, stream=True)) for _ in range(8)]
        requests += [self.send(self.split, chat("y " * 6000, stream=True)) for _ in range(4)]
        requests.append(self.leave_queue())
        requests += [
            self.send(self.split, chat(model="unknown")),
            self.send(self.split, request(b"{")),
        ]
        if number % 2 == 0 and not self.kv.injected.get("decode"):
            self.kv.inject("prefill", Faults(before=scripts.error(500)))
            self.kv.inject("decode", *[Faults(before=fail_transfer)] * 5)
        whole = chat_body(stream=True, max_tokens=8)
        for key in (*[KEY] * 5, *[JOBS] * 2):  # above the limit per minute
            requests.append(self.send(self.pairs, request(whole, bearer(key))))
        leaves = request(chat_body(stream=True), bearer(KEY))
        requests.append(self.send(self.pairs, leaves, leave_after_s=0.002))
        await asyncio.gather(*requests)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    program("prometheus")
    timeout = aiohttp.ClientTimeout(total=20)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        scene = FakeScene(tmp_path, session)
        await scene.start(stack)
        yield await stack.enter_async_context(scene.under_load())


async def test_every_panel_rule_route_and_reason_has_data(scene: Scene) -> None:
    remaining = {expr: origin for expr, origin in queries().items() if expr not in EMPTY}
    assert len(remaining) > 100
    remaining |= queries_of_cases()

    missing = await retry_until_empty(partial(scene.prometheus.unanswered, remaining))
    assert not missing, "\n".join(f"{origin}: {expr}" for expr, origin in missing.items())
    excused = EMPTY | excused_queries()
    assert await scene.prometheus.unanswered(dict(excused)) == excused, (
        "has data, so needs no excuse"
    )
    await scene.prometheus.check_healthy()


def test_excused_queries_exist() -> None:
    assert EMPTY.keys() <= queries().keys()

"""Real Prometheus scrapes routers and workers under load, and every panel and rule has its answer.

Routers and Prometheus are real processes; workers are fakes whose pages are made by what the engine
half declares, as are the faults that some panels are there to show.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.prometheus.corners import EMPTY, KEY, RULES, every_route, seen, unseen
from tests.prometheus.pages import EnginePage
from tests.prometheus.scene import Scene, fake
from tests.prometheus.server import exhausted, questions
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
  - {{name: idle, role: long, url: "{idle}"}}
{mutes}
{corners}
discovery:
  kubernetes: {{url: "http://127.0.0.1:{nobody}"}}
  pools:
    - {{name: found, role: short, dns: localhost, port: {found_port}, max_requests: 1}}
    - {{name: untold, role: short, selector: app=nobody}}
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
{corners}
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


async def lost_transfer(call: Call) -> None:
    """Fail where blocks are to be fetched, and let them be freed; serve what comes whole."""
    body = call.json()
    if body["model"] != "tiny":
        await scripts.error(404)(call)
    elif "remote_block_ids" in (body.get("kv_transfer_params") or {}):
        await scripts.error(500)(call)
    else:
        await scripts.stream(6)(call)


class Fakes(Scene):
    """Every worker is one."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        super().__init__(folder, session)
        self.kv = Kv()

    async def start(self, stack: AsyncExitStack) -> None:
        """Start everything."""
        page = EnginePage(0.4)
        fakes = {
            name: await fake(stack, name)
            for name in ("s0", "bad", "l0", "idle", "found", "p0", "d0", "d1")
        }
        for each in fakes.values():
            each.always(page.script(), "/metrics")
            each.always(scripts.stream(6, gap_s=0.02, with_usage=True))
        fakes["bad"].always(scripts.error(500))
        for name in ("s0", "l0", "found"):
            fakes[name].always(scripts.answer(), COMPLETIONS)
        for name in ("p0", "d0", "d1"):
            fakes[name].always(self.kv.worker(fakes[name], "prefill" if name == "p0" else "decode"))
        (self.folder / "keys").write_text(KEY)
        given = {name: each.url for name, each in fakes.items()}
        given |= {"found_port": str(fakes["found"].port), "nobody": str(free_port())}
        ports = [each.port for each in fakes.values()]
        await self.begin(stack, FLEETS, given, ports, JOBS_KEY=JOBS)

    async def once(self, number: int) -> None:
        """Ask for everything: each route, shorts and longs, what is refused, what fails."""
        # First of all: the queue is soon full.
        some: list[Awaitable[None]] = [
            self.send(self.split, request(IN_ONE_PIECE, path=COMPLETIONS))
        ]
        some += [self.send(self.split, each) for each in every_route(stream=True)]
        some += [self.send(self.split, chat("x" * 200, stream=True)) for _ in range(8)]
        some += [self.send(self.split, chat("y " * 6000, stream=True)) for _ in range(4)]
        some.append(self.mutes.leave(self.split))
        some += [
            self.send(self.split, chat(model="nobody's")),
            self.send(self.split, request(b"{")),
        ]
        if number % 2 == 0 and not self.kv.injected.get("decode"):
            self.kv.inject("prefill", Faults(before=scripts.error(500)))
            self.kv.inject("decode", *[Faults(before=lost_transfer)] * 5)
        whole = chat_body(stream=True, max_tokens=8)
        for key in (*[KEY] * 5, *[JOBS] * 2):  # one too many for a minute, however slow this is
            some.append(self.send(self.pairs, request(whole, bearer(key))))
        leaves = request(chat_body(stream=True), bearer(KEY))
        some.append(self.send(self.pairs, leaves, leave_after_s=0.002))
        await asyncio.gather(*some)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Start everything, with load."""
    program("prometheus")
    timeout = aiohttp.ClientTimeout(total=20)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        made = Fakes(tmp_path, session)
        await made.start(stack)
        yield await stack.enter_async_context(made.under_load())


async def test_every_panel_rule_route_and_reason_has_something_to_show(scene: Scene) -> None:
    left = {expr: who for expr, who in questions().items() if expr not in EMPTY}
    assert len(left) > 100
    left |= seen()

    missing = await exhausted(partial(scene.prometheus.unanswered, left))
    assert not missing, "\n".join(f"{who}: {expr}" for expr, who in missing.items())
    excused = EMPTY | unseen()
    assert await scene.prometheus.unanswered(dict(excused)) == excused, "has data: no excuse"
    await scene.prometheus.is_well()


def test_the_list_of_excuses_is_of_questions_that_there_are() -> None:
    assert EMPTY.keys() <= questions().keys()

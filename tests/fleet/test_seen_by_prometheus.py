"""Real workers, a real Prometheus: every panel, rule and alert has something to show of them.

What only faults show, and what single policies tell that run on none of these workers, is asked of
fakes in tests/prometheus/test_live.py; here it stands on the list, with its reason. Each route and
each reason, of real workers too, are those of test_every_route.py and test_every_reason.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from grafana.boards import engine
from proxy.config import FleetConfig
from proxy.core.model.route_table import ROUTES
from tests.fleet.test_router import port_of
from tests.prometheus.rare_cases import begin_batch
from tests.prometheus.scene import Scene, fake
from tests.prometheus.server import VARIABLES, plain, queries, retry_until_empty
from tests.prometheus.tools import ALERTS, program
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import bearer, chat, request
from vllm_sched.workers.launch import Worker

KEY, NIGHT = "sk-vs-of-the-chat-window", "sk-vs-of-jobs-at-night"
SPLIT = """
model: tiny
workers:
  - {{name: s0, role: short, url: "{short}", max_requests: 2, max_model_len: 2048}}
  - {{name: l0, role: long, url: "{long}", max_requests: 4}}
  - {{name: bad, role: short, url: "{bad}", max_model_len: 2048}}
  - {{name: idle, role: long, url: "{idle}"}}
{silent}
discovery:
  pools:
    - name: found
      role: short
      dns: localhost
      port: {found_port}
      max_requests: 1
      max_model_len: 2048
routing: {{short_limit: 1500}}
router:
  port: {port}
  admin: {{port: {admin}}}
  probe: {{interval_s: 1}}
  queue: {{max_requests: 20, max_wait_s: 2}}
"""
PAIRS = """
model: tiny
workers:
  - {{name: prefill-0, role: prefill, url: "{prefill}"}}
  - {{name: decode-0, role: decode, url: "{decode}"}}
transfer: nixl
tenants:
  - {{name: chat, class: interactive, keys_file: {folder}/keys}}
  - {{name: jobs, class: batch, keys_file: {folder}/night, limits: {{requests_per_minute: 1}}}}
routing: {{disaggregate_above: 256}}
router:
  port: {port}
  admin: {{port: {admin}}}
  probe: {{interval_s: 1}}
  batches: {{path: {folder}/batches}}
"""
FLEETS = {"split": SPLIT, "pairs": PAIRS}
BATCH_WRITES = 15_000  # tokens: it is not over before somebody has looked
# What there is to see only once something went wrong, by parts of the questions.
FAULTS = {
    "sum by (outcome) (rate(proxy_handovers_total{$,outcome!~": "blocks that nobody fetched",
    "min by (name) (proxy_discovery_up{$}) == 0": "pools of which nothing is told",
    "sum by (prefill, decode) (rate(proxy_handover_bars_total{$}[20s]))": "links that failed",
    'absent(up{job=~"(.*/)?router"})': "that no router is there",
}


def excused() -> set[str]:
    """Name what has nothing to show here, as a list has it."""
    (row,) = (row for row in engine.BOARD.rows if row.title == "Single policies")
    others = [panel for panel in row.panels if not panel.title.startswith("long_prompt:")]
    others += [panel for panel in engine.BOARD.panels() if panel.title in ("Chunk budget", "K")]
    asked = {query.expr for panel in others for query in panel.queries}
    for name, value in VARIABLES.items():
        asked = {expr.replace(name, value) for expr in asked}
    faults = [plain(e) for e in queries() if any(part in plain(e) for part in FAULTS)]
    return {*map(plain, asked), *faults}


class Real(Scene):
    """Workers are real, but for one that fails and one that is drained."""

    async def start(self, stack: AsyncExitStack, urls: dict[str, str]) -> None:
        """Start what the workers lack."""
        bad, idle = await fake(stack, "bad"), await fake(stack, "idle")
        bad.always(scripts.error(500))
        for name, key in (("keys", KEY), ("night", NIGHT)):
            (self.folder / name).write_text(key)
        ports = {name: port_of(url) for name, url in urls.items()}
        given = {**urls, "bad": bad.url, "idle": idle.url, "found_port": ports["short"]}
        await self.begin(stack, FLEETS, given, {*ports.values()})
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": BATCH_WRITES}
        await begin_batch(self.pairs, bearer(KEY), {"model": "tiny", "ignore_eos": True, **body})

    async def send_all(self, number: int) -> None:
        """Ask for everything: each route, shorts and longs, split and whole, what is refused."""
        some = [
            self.send(self.split, chat("hello there", stream=True, max_tokens=12)) for _ in range(5)
        ]
        # More than the policy of the worker for longs lets prefill at once, and for all of them
        # there is no other: each takes several steps, so that the next is there before it is done.
        for again in range(4):
            long = f"{number} {again} " + "long " * 3000
            some.append(self.send(self.split, chat(long, stream=True, max_tokens=6)))
        some.append(self.send(self.split, chat(model="nobody's")))
        some.append(self.silent.leave(self.split))
        for path in ROUTES:
            body = {"model": "tiny", "prompt": "hi", "input": "hi", "max_tokens": 2}
            some.append(self.send(self.split, request(json.dumps(body).encode(), path=path)))
        for key, times in ((KEY, 3), (NIGHT, 2)):  # by night one too many, however slow this is
            for again in range(times):
                text = f"{number} {again} " + "to be handed over " * 60
                some.append(
                    self.send(self.pairs, chat(text, bearer(key), stream=True, max_tokens=6))
                )
        await asyncio.gather(*some)


@pytest.fixture
async def scene(
    workers: dict[str, Worker], ends: dict[str, Worker], fleet: FleetConfig, tmp_path: Path
) -> AsyncIterator[Scene]:
    """Start everything, with load."""
    program("prometheus")
    urls = {"short": workers["default"].url, "long": workers["long_prompt"].url}
    urls |= {str(worker.role): ends[worker.name].url for worker in fleet.workers}
    timeout = aiohttp.ClientTimeout(total=60)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        made = Real(tmp_path, session)
        await made.start(stack, urls)
        yield await stack.enter_async_context(made.under_load())


async def test_every_panel_rule_and_alert_is_answered_by_real_workers(scene: Scene) -> None:
    excuses = excused()
    left = {expr: who for expr, who in queries().items() if plain(expr) not in excuses}
    assert len(left) > 150
    alerts = {who.split()[1].strip(",") for who in left.values() if who.endswith("its limits")}
    assert {*ALERTS} - alerts == {"NoRouter"}
    missing = await retry_until_empty(partial(scene.prometheus.unanswered, left))
    assert len(excuses) < 40
    assert not missing, "\n".join(f"{who}: {expr}" for expr, who in missing.items())
    await scene.prometheus.check_healthy()

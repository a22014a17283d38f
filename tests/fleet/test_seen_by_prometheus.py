"""Every panel, rule and alert has data of real workers in a real Prometheus.

Queries about faults and about single policies that these workers lack are tested with fakes in
tests/prometheus/test_live.py, as each reason; here they are excused. test_every_route.py tests
each route.
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
  - {{name: idle, role: long, url: "{idle}", journal: "ipc:///nowhere/journal"}}
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
BATCH_WRITES = 15_000  # tokens: long enough to be scraped
# Queries that have data only after faults, by parts of their text.
FAULTS = {
    "sum by (outcome) (rate(proxy_handovers_total{$,outcome!~": "blocks that nobody fetched",
    "1 - min by (name) (proxy_discovery_up{$}) > 0": "pools of which nothing is told",
    "sum by (prefill, decode) (rate(proxy_handover_bars_total{$}[20s]))": "links that failed",
    'absent(up{job=~"(.*/)?router"})': "that no router is there",
}


def excused_expressions() -> set[str]:
    """Return the queries that are excused here."""
    (row,) = (row for row in engine.BOARD.rows if row.title == "Single policies")
    others = [panel for panel in row.panels if not panel.title.startswith("long_prompt:")]
    others += [panel for panel in engine.BOARD.panels() if panel.title in ("Chunk budget", "K")]
    expressions = {query.expr for panel in others for query in panel.queries}
    for name, value in VARIABLES.items():
        expressions = {expr.replace(name, value) for expr in expressions}
    faults = [plain(e) for e in queries() if any(part in plain(e) for part in FAULTS)]
    return {*map(plain, expressions), *faults}


class RealScene(Scene):
    """Real workers, plus a fake that fails and a fake that is drained."""

    async def start(self, stack: AsyncExitStack, urls: dict[str, str]) -> None:
        """Start the fakes and the routers."""
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
        """Send requests of every route, length, hand-over and refusal."""
        due = b"X-Request-Deadline-Ms: 60000"
        hello = chat("hello there", due, stream=True, max_tokens=12)
        sends = [self.send(self.split, hello) for _ in range(5)]
        # More long prompts than the policy lets prefill at once. Each takes several steps, so that
        # they overlap.
        for again in range(4):
            long = f"{number} {again} " + "long " * 3000
            sends.append(self.send(self.split, chat(long, stream=True, max_tokens=6)))
        sends.append(self.send(self.split, chat(model="nobody's")))
        sends.append(self.leave_queue())
        for path in ROUTES:
            body = {"model": "tiny", "prompt": "hi", "input": "hi", "max_tokens": 2}
            sends.append(self.send(self.split, request(json.dumps(body).encode(), path=path)))
        for key, times in ((KEY, 3), (NIGHT, 2)):  # the night tenant sends one too many
            for again in range(times):
                text = f"{number} {again} " + "to be handed over " * 60
                sends.append(
                    self.send(self.pairs, chat(text, bearer(key), stream=True, max_tokens=6))
                )
        await asyncio.gather(*sends)


@pytest.fixture
async def scene(
    workers: dict[str, Worker], ends: dict[str, Worker], fleet: FleetConfig, tmp_path: Path
) -> AsyncIterator[Scene]:
    """Start everything, and run load."""
    program("prometheus")
    urls = {"short": workers["default"].url, "long": workers["long_prompt"].url}
    urls |= {str(worker.role): ends[worker.name].url for worker in fleet.workers}
    timeout = aiohttp.ClientTimeout(total=60)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        made = RealScene(tmp_path, session)
        await made.start(stack, urls)
        yield await stack.enter_async_context(made.under_load())


async def test_every_panel_rule_and_alert_has_data_of_real_workers(scene: Scene) -> None:
    excuses = excused_expressions()
    left = {expr: panel for expr, panel in queries().items() if plain(expr) not in excuses}
    assert len(left) > 150
    alerts = {
        panel.split()[1].strip(",") for panel in left.values() if panel.endswith("its limits")
    }
    assert {*ALERTS} - alerts == {"NoRouter"}
    missing = await retry_until_empty(partial(scene.prometheus.unanswered, left))
    assert len(excuses) < 40
    assert not missing, "\n".join(f"{panel}: {expr}" for expr, panel in missing.items())
    await scene.prometheus.check_healthy()

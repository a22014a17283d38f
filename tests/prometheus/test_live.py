"""Real Prometheus scrapes routers and workers under load, and every panel and rule has its answer.

Routers and Prometheus are real processes; workers are fakes whose pages are made by what the engine
half declares, as are the faults that some panels are there to show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from grafana.build import BOARDS
from grafana.panels import series
from proxy.core import routes
from tests.prometheus.pages import EnginePage
from tests.prometheus.tools import ALERTS, PROMETHEUS, RECORDED, program
from tests.proxy.wire import scripts
from tests.proxy.wire.client import Client, chat, request
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.kv import Faults, Kv
from tests.proxy.wire.pairs import chat_body
from vllm_sched.workers.launch import free_port

STARTS_S, ANSWERS_S = 120.0, 180.0
PUT = {
    "$__rate_interval": "20s", "$job": ".*", "$instance": ".*", "$model": ".*",
    "$ttft_slo": "3.0", "$itl_slo": "0.2",
}  # fmt: skip
# Queries that may have nothing to show, and why.
MAY_BE_EMPTY = {
    "min by (name) (proxy_discovery_up{$}) == 0": "shows pools only while nothing is told of them",
    "sum by (prefill, decode) (rate(proxy_handover_bars_total{$}[20s]))": "shows links only "
    "once some hand-overs in a row have failed on them",
    "sum by (status) (proxy_batches{$})": "shows batches only while there are some",
}
SPLIT = """
model: tiny
workers:
  - {{name: s0, role: short, url: "{s0}", max_requests: 2}}
  - {{name: bad, role: short, url: "{bad}"}}
  - {{name: l0, role: long, url: "{l0}", max_requests: 2}}
  - {{name: idle, role: long, url: "{idle}"}}
discovery:
  pools:
    - {{name: found, role: short, dns: localhost, port: {found}, max_requests: 1}}
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
transfer: {{connector: nixl}}
tenants:
  - {{name: chat, class: interactive, keys_file: {keys}}}
  - {{name: jobs, keys_env: JOBS_KEY, limits: {{requests_per_minute: 20}}}}
routing: {{disaggregate_above: 1}}
router:
  port: {port}
  admin: {{port: {admin}}}
  probe: {{interval_s: 1}}
  retries: {{budget: 1}}
  batches: {{path: {batches}}}
"""


CHAT, JOBS = "sk-vs-of-the-chat-window", "sk-vs-of-jobs-at-night"


def bearer(key: str) -> bytes:
    """Write the header that shows a key."""
    return b"Authorization: Bearer " + key.encode()


@asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[None]:
    """Run something, and end it."""
    with log.open("wb") as out:
        started = await asyncio.create_subprocess_exec(
            *command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "JOBS_KEY": JOBS},
        )
        try:
            yield
        finally:
            if started.returncode is None:
                started.kill()
            await started.wait()


async def reached(session: aiohttp.ClientSession, url: str, log: Path) -> None:
    """Wait until somebody answers 200 there."""
    try:
        async with asyncio.timeout(STARTS_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)
    except TimeoutError:
        said = await asyncio.to_thread(log.read_text)
        pytest.fail(f"{url} never answered 200: {said[-3000:]}")


async def lost_transfer(call: Call) -> None:
    """Fail where blocks are to be fetched, and let them be freed; serve what comes whole."""
    body = call.json()
    if body["model"] != "tiny":
        await scripts.error(404)(call)
    elif "remote_block_ids" in (body.get("kv_transfer_params") or {}):
        await scripts.error(500)(call)
    else:
        await scripts.stream(6)(call)


class Scene:
    """Two routers with their workers, and Prometheus beside them."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.folder, self.session = folder, session
        self.fakes: dict[str, FakeWorker] = {}
        self.kv = Kv()
        self.split, self.pairs, self.prometheus = free_port(), free_port(), free_port()
        self.admin = free_port()
        self.enough, self.rounds = False, 0

    async def begin(self, stack: AsyncExitStack) -> None:
        """Start everything."""
        page = EnginePage(0.4)
        for name in ("s0", "bad", "l0", "idle", "found", "p0", "d0", "d1"):
            fake = self.fakes[name] = FakeWorker(name)
            await fake.listen()
            stack.push_async_callback(fake.stop)
            fake.always(page.script(), "/metrics")
            fake.always(scripts.stream(6, gap_s=0.02, with_usage=True))
        self.fakes["bad"].always(scripts.error(500))
        for name in ("p0", "d0", "d1"):
            role = "prefill" if name == "p0" else "decode"
            self.fakes[name].always(self.kv.worker(self.fakes[name], role))
        urls: dict[str, object] = {name: fake.url for name, fake in self.fakes.items()}
        found = self.fakes["found"].port
        urls["keys"] = self.folder / "keys"
        urls["batches"] = self.folder / "batches"
        (self.folder / "keys").write_text(CHAT)
        for name, text, port, admin in (
            ("split", SPLIT, self.split, self.admin),
            ("pairs", PAIRS, self.pairs, free_port()),
        ):
            source, log = self.folder / f"{name}.yaml", self.folder / f"{name}.log"
            source.write_text(text.format(**urls | {"found": found}, port=port, admin=admin))
            command = (sys.executable, "-m", "vllm_sched.cli.main", "router", str(source))
            await stack.enter_async_context(process(*command, log=log))
        for name, port in (("split", self.split), ("pairs", self.pairs)):
            await reached(
                self.session, f"http://127.0.0.1:{port}/ready", self.folder / f"{name}.log"
            )
        async with self.session.post(
            f"http://127.0.0.1:{self.admin}/admin/workers/idle/drain"
        ) as answer:
            assert answer.status == 200
        await self._prometheus(stack)

    async def _prometheus(self, stack: AsyncExitStack) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {
            "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s",
        }  # fmt: skip
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        targets = {
            "router": [self.split, self.pairs],
            "worker": [fake.port for fake in self.fakes.values()],
        }
        for name, ports in targets.items():
            listed = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
            (self.folder / f"{name}s.yaml").write_text(yaml.safe_dump(listed))
        for job in config["scrape_configs"]:
            for each in job["file_sd_configs"]:
                each["files"] = [f.replace("/targets", str(self.folder)) for f in each["files"]]
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = self.folder / "prometheus.log"
        command = (
            program("prometheus"),
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.prometheus}",
            "--log.level=warn",
        )
        await stack.enter_async_context(process(*command, log=log))
        await reached(self.session, f"http://127.0.0.1:{self.prometheus}/-/ready", log)

    async def ask(self, expr: str) -> list[Any]:
        """Ask Prometheus; what it calls a mistake is one."""
        url = f"http://127.0.0.1:{self.prometheus}/api/v1/query"
        async with self.session.post(url, data={"query": expr}) as answer:
            told = await answer.json()
        assert told["status"] == "success", (expr, told)
        return list(told["data"]["result"])

    # Load

    async def send(self, port: int, data: bytes, *, leave_after_s: float | None = None) -> None:
        """Ask a router once; leave early if so told."""
        client = await Client.connect(port)
        try:
            if leave_after_s is None:
                await client.ask(data, within=60.0)
            else:
                await client.send(data)
                await asyncio.sleep(leave_after_s)
        finally:
            client.close()

    async def once(self) -> None:
        """Ask for everything: each route, shorts and longs, what is refused, what fails."""
        some: list[Awaitable[None]] = []
        for path in routes.ROUTES:
            body = {"model": "tiny", "prompt": "hi", "input": "hi", "stream": True}
            some.append(self.send(self.split, request(json.dumps(body).encode(), path=path)))
        some += [self.send(self.split, chat("x" * 200, stream=True)) for _ in range(8)]
        some += [self.send(self.split, chat("y " * 6000, stream=True)) for _ in range(4)]
        some += [
            self.send(self.split, chat(model="nobody's")),
            self.send(self.split, request(b"{")),
        ]
        self.rounds += 1
        if self.rounds % 2 and not self.kv.wrongs.get("decode"):
            self.kv.wrong("prefill", Faults(before=scripts.error(500)))
            self.kv.wrong("decode", *[Faults(before=lost_transfer)] * 5)
        whole = chat_body(stream=True, max_tokens=8)
        for key in (*[CHAT] * 5, JOBS):
            some.append(self.send(self.pairs, request(whole, bearer(key))))
        leaves = request(chat_body(stream=True), bearer(CHAT))
        some.append(self.send(self.pairs, leaves, leave_after_s=0.002))
        await asyncio.gather(*some)

    async def load(self) -> None:
        """Do so until it is enough."""
        while not self.enough:
            await self.once()
            await asyncio.sleep(0.5)  # Prometheus and whoever asks it want to have their turn


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Start everything, with load."""
    program("prometheus")
    timeout = aiohttp.ClientTimeout(total=20)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        made = Scene(tmp_path, session)
        await made.begin(stack)
        loading = asyncio.create_task(made.load())
        try:
            yield made
        finally:
            made.enough = True
            await loading


def questions() -> dict[str, str]:
    """Return what is asked, and by whom."""
    asked = {}
    for board in BOARDS:
        for title, expr in board.expressions():
            for name, value in PUT.items():
                expr = expr.replace(name, value)  # noqa: PLW2901  # one after the other
            asked[expr] = f"{board.title}: {title}"
    asked |= dict.fromkeys(RECORDED, "rules.yml")
    for name, alert in ALERTS.items():
        # An alert has nothing to show while all is well; what it looks at has.
        asked |= dict.fromkeys(sorted(series(alert["expr"])), f"alert {name}")
    return asked


def may_be_empty(expr: str) -> bool:
    """Whether a query stands on the list."""
    selector = 'job=~".*",instance=~".*"'
    return expr.replace(selector, "$") in MAY_BE_EMPTY


async def exhausted(what: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
    """Wait until nothing is left, or for as long as may be; return what is."""
    left: dict[str, str] = {"": "never asked"}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWERS_S):
            while left := await what():  # noqa: ASYNC110  # another process is waited for
                await asyncio.sleep(1.0)
    return left


async def test_every_panel_and_every_rule_has_something_to_show(scene: Scene) -> None:
    left = {expr: who for expr, who in questions().items() if not may_be_empty(expr)}
    assert len(left) > 100

    async def unanswered() -> dict[str, str]:
        for expr in list(left):
            found = await scene.ask(expr)
            if any(float(each["value"][1]) == float(each["value"][1]) for each in found):
                del left[expr]
        return left

    missing = await exhausted(unanswered)
    assert not missing, "\n".join(f"{who}: {expr}" for expr, who in missing.items())
    for expr in filter(may_be_empty, questions()):
        await scene.ask(expr)  # it is understood at least

    async with scene.session.get(f"http://127.0.0.1:{scene.prometheus}/api/v1/rules") as answer:
        told = await answer.json()
    there = [rule for group in told["data"]["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in there} == {*RECORDED, *ALERTS}
    assert {(r["name"], r.get("lastError")) for r in there if r["health"] != "ok"} == set()
    async with scene.session.get(f"http://127.0.0.1:{scene.prometheus}/api/v1/targets") as answer:
        told = await answer.json()
    assert {
        (t["scrapeUrl"], t["lastError"])
        for t in told["data"]["activeTargets"]
        if t["health"] != "up"
    } == set()


def test_the_list_of_excuses_is_of_queries_that_there_are() -> None:
    excused = [expr for expr in questions() if may_be_empty(expr)]
    assert len(excused) == len(MAY_BE_EMPTY)

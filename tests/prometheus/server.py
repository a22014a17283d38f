"""A real Prometheus with the rules as they ship; all that boards, rules and alerts ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from grafana.build import BOARDS
from grafana.panels import series
from tests.prometheus.tools import ALERTS, PROMETHEUS, RECORDED, program
from vllm_sched.workers.launch import free_port

STARTS_S, ANSWERS_S = 240.0, 480.0
PUT = {
    "$__rate_interval": "20s", "$job": ".*", "$instance": ".*", "$model": ".*",
    "$ttft_slo": "3.0", "$itl_slo": "0.2",
}  # fmt: skip
# What an alert compares with: without it, its expression has an answer while all is well too.
LIMIT = re.compile(r"\s*(?:[<>]=?|==)\s*[\d.]+(?:\s*\*\s*[\d.]+)?")


@asynccontextmanager
async def process(*command: str, log: Path, **more: str) -> AsyncIterator[None]:
    """Run something, and end it."""
    with log.open("wb") as out:
        started = await asyncio.create_subprocess_exec(
            *command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **more},
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


class Prometheus:
    """One that scrapes each second."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self._folder, self._session = folder, session
        self._url = f"http://127.0.0.1:{free_port()}"

    async def begin(self, stack: AsyncExitStack, targets: Mapping[str, Sequence[int]]) -> None:
        """Start it, with the ports of `router` and `worker`."""
        folder = self._folder
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {
            "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s",
        }  # fmt: skip
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        for name, ports in targets.items():
            listed = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
            (folder / f"{name}s.yaml").write_text(yaml.safe_dump(listed))
        for job in config["scrape_configs"]:
            for each in job["file_sd_configs"]:
                each["files"] = [f.replace("/targets", str(folder)) for f in each["files"]]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = folder / "prometheus.log"
        command = (
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
            "--log.level=warn",
        )
        await stack.enter_async_context(process(*command, log=log))
        await reached(self._session, f"{self._url}/-/ready", log)

    async def ask(self, expr: str) -> list[Any]:
        """Ask; what it calls a mistake is one."""
        async with self._session.post(f"{self._url}/api/v1/query", data={"query": expr}) as answer:
            told = await answer.json()
        assert told["status"] == "success", (expr, told)
        return list(told["data"]["result"])

    async def unanswered(self, left: dict[str, str]) -> dict[str, str]:
        """Ask what has had no answer; return what still has none, or nothing but NaN."""
        for expr in list(left):
            found = await self.ask(expr)
            if any(float(each["value"][1]) == float(each["value"][1]) for each in found):
                del left[expr]
        return left

    async def is_well(self) -> None:
        """See that all rules are loaded and evaluated, and all targets scraped."""
        async with self._session.get(f"{self._url}/api/v1/rules") as answer:
            told = await answer.json()
        there = [rule for group in told["data"]["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in there} == {*RECORDED, *ALERTS}
        assert {(r["name"], r.get("lastError")) for r in there if r["health"] != "ok"} == set()
        # A scrape that was late once, on a slow machine, is made again.
        assert await exhausted(self._not_scraped) == {}

    async def _not_scraped(self) -> dict[str, str]:
        async with self._session.get(f"{self._url}/api/v1/targets") as answer:
            told = await answer.json()
        targets = told["data"]["activeTargets"]
        return {t["scrapeUrl"]: t["lastError"] for t in targets if t["health"] != "up"}


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
        asked |= dict.fromkeys(sorted(series(alert["expr"])), f"alert {name}")
        asked[LIMIT.sub("", alert["expr"])] = f"alert {name}, without its limits"
    return asked


def plain(expr: str) -> str:
    """Write a question as it stands on a list of excuses."""
    return expr.replace('job=~".*",instance=~".*"', "$")


async def exhausted(what: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
    """Wait until nothing is left, or for as long as may be; return what is."""
    left: dict[str, str] = {"": "never asked"}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWERS_S):
            while left := await what():  # noqa: ASYNC110  # another process is waited for
                await asyncio.sleep(1.0)
    return left

"""A real Prometheus with the shipped rules, and all queries of boards, rules and alerts."""

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
from tests.prometheus.tools import ALERTS, GO, PROMETHEUS, RECORDED, program
from vllm_sched.workers.launch import free_port

START_TIMEOUT_S, ANSWER_TIMEOUT_S = 240.0, 480.0
VARIABLES = {
    "$__rate_interval": "20s", "$job": ".*", "$instance": ".*", "$model": ".*",
    "$ttft_slo": "3.0", "$itl_slo": "0.2",
}  # fmt: skip
# The comparison of an alert. Without it, the expression also has data while the alert is silent.
LIMIT = re.compile(r"\s*(?:[<>]=?|==)\s*[\d.]+(?:\s*\*\s*[\d.]+)?")


@asynccontextmanager
async def process(*command: str, log: Path, **environment: str) -> AsyncIterator[None]:
    with log.open("wb") as out:
        running = await asyncio.create_subprocess_exec(
            *command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        try:
            yield
        finally:
            if running.returncode is None:
                running.kill()
            await running.wait()


async def wait_until_ready(session: aiohttp.ClientSession, url: str, log: Path) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)
    except TimeoutError:
        text = await asyncio.to_thread(log.read_text)
        pytest.fail(f"{url} never answered 200: {text[-3000:]}")


class Prometheus:
    """A Prometheus that scrapes every second."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self._folder, self._session = folder, session
        self._url = f"http://127.0.0.1:{free_port()}"

    async def begin(self, stack: AsyncExitStack, targets: Mapping[str, Sequence[int]]) -> None:
        """Start Prometheus with these ports of `router` and `worker`."""
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
            for source in job["file_sd_configs"]:
                source["files"] = [f.replace("/targets", str(folder)) for f in source["files"]]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = folder / "prometheus.log"
        command = (
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
            "--log.level=warn",
        )
        await stack.enter_async_context(process(*command, log=log, **GO))
        await wait_until_ready(self._session, f"{self._url}/-/ready", log)

    async def ask(self, expr: str) -> list[Any]:
        """Run a query; raise if Prometheus reports an error."""
        async with self._session.post(f"{self._url}/api/v1/query", data={"query": expr}) as answer:
            response = await answer.json()
        assert response["status"] == "success", (expr, response)
        return list(response["data"]["result"])

    async def unanswered(self, remaining: dict[str, str]) -> dict[str, str]:
        """Run the remaining queries; return those without data or with only NaN."""
        for expr in list(remaining):
            found = await self.ask(expr)
            if any(float(item["value"][1]) == float(item["value"][1]) for item in found):
                del remaining[expr]
        return remaining

    async def check_healthy(self) -> None:
        """Check that all rules are evaluated and all targets are scraped."""
        async with self._session.get(f"{self._url}/api/v1/rules") as answer:
            response = await answer.json()
        loaded = [rule for group in response["data"]["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in loaded} == {*RECORDED, *ALERTS}
        assert {(r["name"], r.get("lastError")) for r in loaded if r["health"] != "ok"} == set()
        # On a slow machine, a late scrape is repeated.
        assert await retry_until_empty(self._not_scraped) == {}

    async def _not_scraped(self) -> dict[str, str]:
        async with self._session.get(f"{self._url}/api/v1/targets") as answer:
            response = await answer.json()
        targets = response["data"]["activeTargets"]
        return {t["scrapeUrl"]: t["lastError"] for t in targets if t["health"] != "up"}


def queries() -> dict[str, str]:
    found = {}
    for board in BOARDS:
        for title, expr in board.expressions():
            for name, value in VARIABLES.items():
                expr = expr.replace(name, value)  # noqa: PLW2901  # one after the other
            found[expr] = f"{board.title}: {title}"
    found |= dict.fromkeys(RECORDED, "rules.yml")
    for name, alert in ALERTS.items():
        found |= dict.fromkeys(sorted(series(alert["expr"])), f"alert {name}")
        found[LIMIT.sub("", alert["expr"])] = f"alert {name}, without its limits"
    return found


def plain(expr: str) -> str:
    """Return a query as in a list of excuses."""
    return expr.replace('job=~".*",instance=~".*"', "$")


async def retry_until_empty(check: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
    """Repeat a check until nothing is left or time is up; return what is left."""
    remaining: dict[str, str] = {"": "not checked"}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while remaining := await check():  # noqa: ASYNC110  # another process
                await asyncio.sleep(1.0)
    return remaining

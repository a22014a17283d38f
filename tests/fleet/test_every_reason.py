"""Every routing reason, caused with real workers, as a real Prometheus sees it.

The router gets another fleet of the same workers for each scene. A full worker writes a long
answer, an absent one is drained. Only a fake worker fails, and its request is retried.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp

from proxy.config import FleetConfig
from proxy.core.model.types import Reason
from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.wire.handover.two_legs import REFUSED_PREFILL
from tests.fleet.conftest import PREFILL
from tests.fleet.relay import second_address
from tests.fleet.test_handover import Ends, handing_over, listed
from tests.fleet.test_router import PORTS, Router, port_of, routing
from tests.prometheus.rare_cases import excused_queries, query_for
from tests.prometheus.scene import fake
from tests.prometheus.server import Prometheus, retry_until_empty
from tests.prometheus.tools import program
from tests.proxy.running import answer_of
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import Client, bearer, chat, get, request
from vllm_sched.workers.launch import free_port

Json = dict[str, Any]
DEADLINE_S = 120.0
# Tokens of a context of 16,384. A request is long by its maximum output, and its answer ends
# early.
SHORT_LIMIT, WRITES_SHORT, WRITES_LONG = 14_000, 12_000, 15_500
END = {"1": 100}
PROMPT, LATE_PROMPT = 8000, 15_000
HANDED = 600
AWAY = "away"  # a worker that never exists
KEY, NIGHT = "sk-vs-of-the-chat-window", "sk-vs-of-jobs-at-night"
TENANTS: list[Json] = [
    {"name": "chat", "class": "interactive"},
    {"name": "jobs", "class": "batch", "limits": {"requests_per_minute": 1}},
]
PLACED = {
    Reason.SHORT_POOL, Reason.LONG_POOL, Reason.GENERAL_POOL, Reason.DECODE_POOL, Reason.HANDOVER,
    Reason.SPILL_TO_LONG, Reason.SPILL_TO_SHORT, Reason.PREFIX, Reason.ONLY_CHOICE,
    Reason.LEAST_LOADED, Reason.ROUND_ROBIN, Reason.RETRY,
}  # fmt: skip
HANDOVER_REASONS = {
    HandoverVerdict.HANDED_OVER, HandoverVerdict.CACHED, HandoverVerdict.NOT_WORTH_IT,
    HandoverVerdict.NO_PREFILL, HandoverVerdict.PREFILL_BUSY, REFUSED_PREFILL, "samples",
}  # fmt: skip


def brief(*headers: bytes, **fields: Any) -> bytes:
    """Return a request whose answer ends at once."""
    return chat("hi", *headers, **{"logit_bias": END, **fields})


def endless(tokens: int) -> bytes:
    """Return a request whose answer takes tens of seconds."""
    return chat(stream=True, ignore_eos=True, max_tokens=tokens)


def prompt(tokens: int, *headers: bytes, first: int = 10, **fields: Any) -> bytes:
    """Return a completion request with a prompt of `tokens` tokens; `first` makes it unique."""
    ids = [first, *[20 + at % 400 for at in range(tokens - 1)]]
    body = {"model": "tiny", "prompt": ids, "max_tokens": 2, **fields}
    return request(json.dumps(body).encode(), *headers, path="/v1/completions")


class Stage:
    """A router and its clients."""

    def __init__(self, router: Router, session: aiohttp.ClientSession, folder: Path) -> None:
        self.port = port_of(router.url)
        self._admin, self._session = f"{router.admin}/admin", session
        self._source = folder / "fleet.yaml"

    async def reload(self, workers: list[Json], rules: Json, **router: Json) -> None:
        """Give the router a fleet, and wait until its existing workers are up."""
        fleet = {"model": "tiny", "workers": workers, "routing": rules}
        self._source.write_text(json.dumps({**fleet, "router": {**PORTS, **router}}))
        await self._post("reload")
        async with asyncio.timeout(DEADLINE_S):
            while any((w["state"] == "up") == (w["name"] == AWAY) for w in await self._workers()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def busy(self, name: str) -> None:
        """Wait until a worker has a prompt to prefill."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                tokens = {each["name"]: each["prefill_tokens"] for each in await self._workers()}
                if tokens[name]:
                    return
                await asyncio.sleep(0.01)

    async def drain(self, *names: str) -> None:
        """Drain workers."""
        for name in names:
            await self._post(f"workers/{name}/drain")

    async def undrain(self, *names: str) -> None:
        """Undrain workers."""
        for name in names:
            await self._post(f"workers/{name}/undrain")

    async def ask(self, data: bytes) -> int:
        """Send a request; return the status."""
        return (await answer_of(self.port, data, DEADLINE_S)).status

    @asynccontextmanager
    async def held(self, *requests: bytes) -> AsyncIterator[None]:
        """Keep answers streaming, started one after the other."""
        async with AsyncExitStack() as stack:
            for data in requests:
                client = await stack.enter_async_context(self.sent(data))
                assert (await client.head(within=DEADLINE_S)).status == 200
                await client.piece(within=DEADLINE_S)
            yield

    @asynccontextmanager
    async def sent(self, data: bytes) -> AsyncIterator[Client]:
        """Send a request, and disconnect at the end."""
        with closing(await Client.connect(self.port)) as client:
            await client.send(data)
            yield client

    async def _workers(self) -> list[Json]:
        async with self._session.get(f"{self._admin}/workers") as answer:
            found: list[Json] = await answer.json()
        return found

    async def _post(self, what: str) -> None:
        async with self._session.post(f"{self._admin}/{what}") as answer:
            assert answer.status == 200, await answer.text()


def pool(urls: Mapping[str, str], role: str, *names: str, **more: int) -> list[Json]:
    """Return workers of one role."""
    return [{"name": name, "url": urls[name], "role": role, **more} for name in names]


async def by_rules(stage: Stage, urls: Mapping[str, str]) -> None:
    """Cause the reasons of each routing rule, of an only choice, and of a prefix."""
    a, b, *_ = urls
    for policy in ("round_robin", "least_loaded", "adaptive"):
        rules = {"policy": policy, "short_limit": SHORT_LIMIT}
        await stage.reload(pool(urls, "general", a, b), rules)
        assert await stage.ask(brief()) == 200
    for number, away in enumerate((a, b)):  # the only choice; the router learns both workers' pace
        await stage.drain(away)
        assert await stage.ask(prompt(PROMPT, first=10 + number)) == 200
        await stage.undrain(away)
    await stage.drain(b)
    async with stage.held(*[endless(WRITES_SHORT)] * 4):
        await stage.undrain(b)
        # The prefix is on the busy worker, while `b` is idle.
        assert await stage.ask(prompt(PROMPT, first=11)) == 200


async def by_size(stage: Stage, urls: Mapping[str, str]) -> None:
    """Cause placement in the own pool, and in the other pool while the own is full."""
    shorts, longs = [*urls][:2], [*urls][2:]
    workers = pool(urls, "short", *shorts, max_requests=1)
    workers += pool(urls, "long", *longs, max_requests=1)
    await stage.reload(workers, {"short_limit": SHORT_LIMIT})
    long = brief(max_tokens=WRITES_LONG)
    # Shorts first, because after a long request the last slot is kept for the next long one.
    await stage.drain(*longs)
    assert await stage.ask(brief()) == 200
    async with stage.held(*[endless(WRITES_SHORT)] * len(shorts)):
        await stage.undrain(*longs)
        assert await stage.ask(brief()) == 200
    await stage.drain(*shorts)
    assert await stage.ask(long) == 200
    async with stage.held(*[endless(WRITES_LONG)] * len(longs)):
        await stage.undrain(*shorts)
        assert await stage.ask(long) == 200


async def refused(stage: Stage, urls: Mapping[str, str]) -> None:
    """Cause every refusal."""
    name, *_ = urls
    one = pool(urls, "general", name)
    await stage.reload(one, {}, admission={"ttft_s": 0.001})
    assert await stage.ask(request(b"{")) == 400
    assert await stage.ask(get("/nowhere")) == 404
    assert await stage.ask(brief(model="nobodys")) == 404
    await stage.reload(
        [*one, *pool({AWAY: f"http://127.0.0.1:{free_port()}"}, "general", AWAY)], {}
    )
    assert await stage.ask(brief(model="nobodys")) == 503  # AWAY might serve this model
    await stage.reload(one, {}, admission={"ttft_s": 0.001})
    assert await stage.ask(prompt(20_000)) == 400
    assert await stage.ask(brief(b"Origin: https://elsewhere.example")) == 403
    assert (
        await stage.ask(prompt(PROMPT, first=12, stream=True)) == 200
    )  # the router learns its pace
    async with stage.sent(prompt(LATE_PROMPT, first=13, stream=True)):
        await stage.busy(name)
        assert await stage.ask(brief()) == 429
    full = pool(urls, "general", name, max_requests=1)
    await stage.reload(full, {}, queue={"max_requests": 1, "max_wait_s": 2})
    async with stage.held(endless(WRITES_SHORT)):
        assert await stage.ask(brief(b"X-Request-Deadline-Ms: 1")) == 429
        # One request waits in the queue until its limit, one finds the queue full.
        assert await asyncio.gather(*[stage.ask(brief()) for _ in range(2)]) == [429, 429]
    await stage.drain(name)
    assert await stage.ask(brief()) == 503
    await stage.undrain(name)
    await stage.reload(one, {}, timeouts={"request_s": 2, "client_idle_s": 1})
    assert await stage.ask(chat(ignore_eos=True, max_tokens=WRITES_SHORT)) == 504
    assert await stage.ask(brief()[:-1]) == 408


async def retried(stage: Stage, urls: Mapping[str, str]) -> None:
    """Cause a retry on another worker."""
    name, *_ = urls
    async with AsyncExitStack() as stack:
        bad = await fake(stack, "bad")
        bad.always(scripts.error(500))
        workers = pool(urls | {"bad": bad.url}, "general", "bad", name)
        await stage.reload(workers, {"policy": "round_robin"})
        assert [await stage.ask(brief()) for _ in workers] == [200, 200]


async def handed_over(stage: Stage) -> None:
    """Cause a hand-over, and each reason without one that needs no fault."""
    key_header = bearer(KEY)
    assert await stage.ask(brief()) == 401
    assert await stage.ask(get("/v1/files", key_header)) == 200
    assert await stage.ask(brief(key_header)) == 200  # too short
    assert await stage.ask(prompt(HANDED, key_header)) == 200
    assert await stage.ask(prompt(HANDED, key_header)) == 200  # cached
    assert await stage.ask(prompt(HANDED, key_header, first=11, n=2)) == 200  # in one piece
    # The decode worker decides what the prefill worker refused.
    assert await stage.ask(prompt(HANDED, key_header, first=12, temperature=-3)) == 400
    async with stage.sent(prompt(LATE_PROMPT, key_header, first=13)):
        await stage.busy(PREFILL)
        assert await stage.ask(prompt(HANDED, key_header, first=14)) == 200
    await stage.drain(PREFILL)
    assert await stage.ask(prompt(HANDED, key_header, first=15)) == 200
    await stage.undrain(PREFILL)
    night = bearer(NIGHT)
    assert [await stage.ask(brief(night)) for _ in range(2)] == [200, 429]


def questions(workers: Mapping[str, str]) -> dict[str, str]:
    """Return the queries of all reasons, with their names."""
    real = f'status="200",worker=~"{"|".join(workers)}"'
    queries = {
        f'proxy_requests_total{{reason="{reason}",{real}}}'
        if reason in PLACED
        else query_for(reason): f"reason {reason}"
        for reason in Reason
    }
    handover_queries = {
        f'proxy_handover_decisions_total{{why="{why}"}}': why for why in HANDOVER_REASONS
    }
    return {
        each: what for each, what in queries.items() if each not in excused_queries()
    } | handover_queries


async def test_every_reason_is_caused_and_visible_in_prometheus(
    ends: Ends, fleet: FleetConfig, tmp_path: Path
) -> None:
    program("prometheus")
    urls = {name: each.url for name, each in ends.items()}
    hashes = [f"sha256:{sha256(key.encode()).hexdigest()}" for key in (KEY, NIGHT)]
    tenants = [t | {"key_hashes": [h]} for t, h in zip(TENANTS, hashes, strict=True)]
    sides = [w | ({"max_requests": 1} if w["name"] == PREFILL else {}) for w in listed(fleet)]
    folders = tmp_path / "stage", tmp_path / "sides"
    for folder in folders:
        folder.mkdir()
    batches = {"batches": {"path": str(tmp_path / "batches")}}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with AsyncExitStack() as stack:
        for name, worker in ends.items():  # the router sees each as two workers
            urls[f"{name}-too"] = stack.enter_context(second_address(worker.url))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        first = pool(urls, "general", *urls)
        one = stack.enter_context(routing(folders[0], first, {}))
        blocks = {"tenants": tenants, "router": {**PORTS, **batches}}
        two = stack.enter_context(handing_over(folders[1], sides, **blocks))
        stage, pair = Stage(one, session, folders[0]), Stage(two, session, folders[1])
        await by_rules(stage, urls)
        await by_size(stage, urls)
        await refused(stage, urls)
        await retried(stage, urls)
        await handed_over(pair)

        prometheus = Prometheus(tmp_path, session)
        targets = {
            "router": [stage.port, pair.port],
            "worker": [worker.port for worker in ends.values()],
        }
        await prometheus.begin(stack, targets)
        missing = await retry_until_empty(partial(prometheus.unanswered, questions(urls)))
        assert not missing, missing
        excuses = excused_queries()
        assert await prometheus.unanswered(dict(excuses)) == excuses, "has data: no excuse"
        await prometheus.check_healthy()

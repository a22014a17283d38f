"""Rare cases, produced reliably: every reason and every route.

Every case has its own model, so that no other load affects its requests. Workers that never answer
stay full, and workers without other requests stay idle. Cases that need an order send requests one
after the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import aiohttp

from proxy.core.fleet.breaker import MIN_OPEN_S
from proxy.core.fleet.kv_links import FAILURES_TO_BAR
from proxy.core.model.route_table import BY_NAME, ROUTES, PromptFields
from proxy.core.model.types import Reason
from tests.proxy.running import answer_of
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.raw_client import Client, bearer, chat, get, request
from vllm_sched.workers.launch import free_port

START_TIMEOUT_S = 120.0
SLOW_RESPONSE_S = 1.0
LONG, HANDED_OVER = "long " * 4000, "to be handed over " * 200
CHAT, STORED = "/v1/chat/completions", "/v1/responses/resp_1"
KEY = "sk-vs-of-the-chat-window"
BEARER = bearer(KEY)
# A third router: another rule, a queue of one request, and a TTFT target that no worker can meet.
RULES = """
model: turn
workers:
{cases}
routing: {{policy: round_robin}}
router:
  port: {port}
  admin: {{port: {admin}}}
  probe: {{interval_s: 1}}
  queue: {{max_requests: 1, max_wait_s: 600}}
  admission: {{ttft_s: 0.001}}
"""
# The only query of boards, rules and alerts without data in every scene, and why.
EMPTY = {'absent(up{job=~"(.*/)?router"})': "has data if there is no router"}
# Reasons that no scene produces, and why.
UNSEEN = {
    Reason.DRAINING: "of a router that stops and is not scraped any more",
    Reason.AWAITS_CACHE: "of a long prompt whose worker is full beside a free one",
    Reason.ROUTER_FULL: "of a machine without descriptors or ports, also for Prometheus",
}
# Workers and roles by router. `GONE` does not listen and is the only worker that is down.
SPLIT = {
    "crowd-0": "general", "crowd-1": "general", "over-0": "long", "over-1": "short",
    "over-2": "short", "again-0": "general", "again-1": "general", "fails-0": "general",
    "fails-1": "general", "left-0": "general", "gone-0": "general", "busy-0": "general",
    "busy-1": "general",
}  # fmt: skip
PAIRS = {"night-0": "general", "shut-0": "prefill", "shut-1": "decode"}
OTHERS = {"turn-0": "general", "slow-0": "general", "full-0": "general", "ends-0": "general"}
# One request each keeps them full, so that short-lived states last: tokens charged before their
# prefill, a pool with unequal workers, and a spilled request, which has a choice of two workers.
SILENT = {"mute-0": "short", "mute-1": "long", "mute-2": "long"}
FOR_SILENT = chat(model="mute", stream=True)
GONE = "gone-0"
FULL = ("crowd", "over", "full", "mute")  # models whose workers have max_requests 1


def queries_of_cases() -> dict[str, str]:
    """Return a query for each route and reason that a scene must show, with its name."""
    queries_by_route = {
        f'proxy_requests_total{{route="{name}"}}': f"route {name}" for name in BY_NAME
    }
    return queries_by_route | {
        query_for(reason): f"reason {reason}" for reason in Reason if reason not in UNSEEN
    }


def excused_queries() -> dict[str, str]:
    return {query_for(reason): f"reason {reason}: {why}" for reason, why in UNSEEN.items()}


def query_for(reason: Reason) -> str:
    return (
        f'proxy_decisions_total{{reason="{reason}"}} or proxy_requests_total{{reason="{reason}"}}'
    )


def every_route(**fields: object) -> list[bytes]:
    """Return a request for each forwarded path."""
    body = json.dumps({"model": "tiny", "prompt": "hi", "input": "hi"} | fields).encode()
    return [
        *(
            form(path, model=b"tiny", file=b"RIFF")
            if route.shape is PromptFields.FORM
            else request(body, path=path)
            for path, route in ROUTES.items()
        ),
        get(STORED),
        request(b"", path=f"{STORED}/cancel"),
    ]


def form(path: str, *headers: bytes, **fields: bytes) -> bytes:
    lead = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    body = b"".join(lead % (name.encode(), value) for name, value in fields.items()) + b"--b--\r\n"
    kind = b"Content-Type: multipart/form-data; boundary=b"
    head = [b"POST %b HTTP/1.1" % path.encode(), b"Host: router", *headers, kind]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body


async def begin_batch(port: int, bearer: bytes, body: Mapping[str, object]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    file = form("/v1/files", bearer, purpose=b"batch", file=json.dumps(line).encode())
    file_id = (await answer_of(port, file, START_TIMEOUT_S)).json()["id"]
    batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    create = request(json.dumps(batch).encode(), bearer, path="/v1/batches")
    assert (await answer_of(port, create, START_TIMEOUT_S)).status == 200


async def respond_slowly(call: Call) -> None:
    """Answer so slowly that the prompt's duration is learned as long."""
    await asyncio.sleep(SLOW_RESPONSE_S)
    await scripts.stream(2)(call)


class RareCases:
    """Workers of the rare cases, and their requests."""

    def __init__(self, ports: Mapping[str, int], file: Path) -> None:
        self.file = file  # the fleet file of the router with RULES
        self._ports = ports
        self._fakes: dict[str, FakeWorker] = {}
        self._kv = Kv()
        self._refusals = self._losses = 0

    async def listen(self, stack: AsyncExitStack) -> dict[str, str]:
        """Start the workers; return their lines for each fleet file."""
        fleets = {"split": SPLIT, "pairs": PAIRS, "rules": OTHERS, "silent": SILENT}
        return {
            fleet: "\n".join([await self._worker(stack, *item) for item in workers.items()])
            for fleet, workers in fleets.items()
        }

    async def _worker(self, stack: AsyncExitStack, name: str, role: str) -> str:
        model = name.partition("-")[0]
        url = f"http://127.0.0.1:{free_port()}"
        if name != GONE:
            fake = self._fakes[name] = FakeWorker(name, model=model)
            fake.always(self._script(fake, role))
            await fake.listen()
            stack.push_async_callback(fake.stop)
            url = fake.url
        limit = ", max_requests: 1" if model in FULL else ""
        return f'  - {{name: {name}, role: {role}, model: {model}, url: "{url}"{limit}}}'

    def _script(self, fake: FakeWorker, role: str) -> Script:
        model = fake.model
        if model == "shut":
            return self._prefill_script(fake) if role == "prefill" else self._decode_script(fake)
        others: dict[str, Script] = {
            "turn": scripts.obey("turn"), "again": respond_slowly, "slow": self._hang_on_second,
            "fails": self._fail_once(model, 500), "busy": self._fail_once(model, 503),
        }  # fmt: skip
        return others.get(model, scripts.stall)

    def _fail_once(self, model: str, status: int) -> Script:
        """Fail the first request of a model with two workers."""

        async def run(call: Call) -> None:
            served = sum(len(self._fakes[f"{model}-{n}"].served) for n in range(2))
            await (scripts.error(status) if served == 1 else scripts.obey("served"))(call)

        return run

    def _prefill_script(self, fake: FakeWorker) -> Script:
        """Refuse long prompts."""
        script = self._kv.worker(fake, "prefill")

        async def run(call: Call) -> None:
            refuses = LONG.encode() in call.body
            self._refusals += refuses
            await (scripts.error(400) if refuses else script)(call)

        return run

    def _decode_script(self, fake: FakeWorker) -> Script:
        """Fail the first fetch of blocks."""
        script = self._kv.worker(fake, "decode")

        async def run(call: Call) -> None:
            fetches = HANDED_OVER.encode() in call.body and b"remote_block_ids" in call.body
            self._losses += fetches
            await (scripts.error(500) if fetches and self._losses == 1 else script)(call)

        return run

    async def _hang_on_second(self, call: Call) -> None:
        first = len(self._fakes["slow-0"].served) == 1
        await (respond_slowly if first else scripts.stall)(call)

    async def run(
        self, stack: AsyncExitStack, session: aiohttp.ClientSession, admins: Mapping[str, str]
    ) -> None:
        """Produce every case once; `admins` has the URLs of the admin APIs."""
        for url in admins.values():
            await self._wait_until_probed(session, f"{url}/workers")
        await asyncio.gather(self._place(stack), self._refuse(), self._answer(), self._hand_over())
        await self._use_rules(stack, session, f"{admins['rules']}/reload")
        await self._time_out(session, f"{admins['rules']}/reload")

    async def occupy_silent(
        self, stack: AsyncExitStack, session: aiohttp.ClientSession, admin: str
    ) -> None:
        """Send a request for each silent worker; the second spills."""
        await self._wait_until_probed(session, f"{admin}/workers")
        for _ in SILENT:
            await self._hang(stack, "split", FOR_SILENT)
        for name in SILENT:
            await self._fakes[name].got(within=START_TIMEOUT_S)

    async def _place(self, stack: AsyncExitStack) -> None:
        """Produce spills, single choices, timeouts, leaving clients, retries, trials, prefixes."""
        for _ in range(2):
            await self._hang(stack, "split", chat(LONG, model="over"))
            await self._hang(stack, "split", chat(model="crowd"))
        for name in ("crowd-0", "crowd-1", "over-0"):
            await self._fakes[name].got(within=START_TIMEOUT_S)
        assert await self._ask("split", chat(model="crowd")) == 429
        async with AsyncExitStack() as soon:
            await self._hang(soon, "split", chat(model="left", stream=True))
            await self._fakes["left-0"].got(within=START_TIMEOUT_S)
        assert await self._ask("split", chat(model="fails")) == 200
        assert await self._ask("split", chat(model="busy")) == 200
        await asyncio.sleep(2 * MIN_OPEN_S)
        assert await self._ask("split", chat(model="busy")) == 200  # a trial
        for _ in range(2):
            assert await self._ask("split", chat(LONG, model="again", stream=True)) == 200

    async def _refuse(self) -> None:
        ids = json.dumps({"model": "crowd", "prompt": [1] * 20_000, "max_tokens": 2}).encode()
        assert await self._ask("split", request(ids, path="/v1/completions")) == 400
        assert await self._ask("split", request(b"{")) == 400
        assert await self._ask("split", get("/nowhere")) == 404
        assert await self._ask("rules", chat(model="unknown")) == 404
        assert await self._ask("split", chat(model="unknown")) == 503  # GONE may serve it
        assert await self._ask("split", chat(model="gone")) == 503
        assert await self._ask("pairs", chat()) == 401
        assert await self._ask("pairs", get(STORED, BEARER)) == 404

    async def _answer(self) -> None:
        """Send a request without hand-over; start a batch whose line never ends."""
        embed = json.dumps({"model": "tiny", "input": "hi"}).encode()
        await self._ask("pairs", request(embed, BEARER, path="/v1/embeddings"))
        body = {"model": "night", "messages": [{"role": "user", "content": "hi"}]}
        await begin_batch(self._ports["pairs"], BEARER, body)
        await self._fakes["night-0"].got(within=START_TIMEOUT_S)

    async def _hand_over(self) -> None:
        """Lose blocks of a hand-over; let a worker refuse what another serves."""
        number = count()  # new prompts, which the decode worker has not cached
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._losses:  # served whole until the link is warm
                await self._ask(
                    "pairs", chat(f"{next(number)} {HANDED_OVER}", BEARER, model="shut")
                )
            while self._refusals < FAILURES_TO_BAR:
                await self._ask("pairs", chat(f"{next(number)} {LONG}", BEARER, model="shut"))

    async def _use_rules(
        self, stack: AsyncExitStack, session: aiohttp.ClientSession, reload: str
    ) -> None:
        """Use other rules; miss the TTFT target and exceed the queue."""
        assert await self._ask("rules", chat(model="turn")) == 200
        self.file.write_text(self.file.read_text().replace("round_robin", "least_loaded"))
        async with session.post(reload) as answer:
            assert answer.status == 200, await answer.text()
        assert await self._ask("rules", chat(model="turn")) == 200
        assert await self._ask("rules", chat(LONG, model="slow", stream=True)) == 200
        await self._hang(stack, "rules", chat(LONG, model="slow"))
        await self._fakes["slow-0"].got(2, within=START_TIMEOUT_S)
        assert await self._ask("rules", chat(model="slow")) == 429
        soon = b"X-Request-Deadline-Ms: 1"
        assert await self._ask("rules", chat("hi", soon, model="slow")) == 429
        # One request has the worker, one the queue.
        tasks = [asyncio.create_task(self._ask("rules", chat(model="full"))) for _ in range(3)]
        for task in tasks:
            stack.callback(task.cancel)
        [refused], _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result() == 429

    async def _time_out(self, session: aiohttp.ClientSession, reload: str) -> None:
        """Exceed the time limits of a response and of a body."""
        fleet_file = self.file.read_text()
        limits = "  timeouts: {request_s: 2, client_idle_s: 1}\n"
        self.file.write_text(fleet_file.replace("router:\n", f"router:\n{limits}"))
        async with session.post(reload) as answer:
            assert answer.status == 200, await answer.text()
        assert await self._ask("rules", chat(model="ends")) == 504
        assert await self._ask("rules", chat(model="ends")[:-1]) == 408

    async def _ask(self, router: str, data: bytes) -> int:
        return (await answer_of(self._ports[router], data, START_TIMEOUT_S)).status

    async def _hang(self, stack: AsyncExitStack, router: str, data: bytes) -> None:
        """Send a request that is never answered, and keep it."""
        client = await Client.connect(self._ports[router])
        stack.callback(client.close)
        await client.send(data)

    async def _wait_until_probed(self, session: aiohttp.ClientSession, url: str) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                async with session.get(url) as answer:
                    states = {worker["name"]: worker["state"] for worker in await answer.json()}
                if all((name == GONE) == (state != "up") for name, state in states.items()):
                    return
                await asyncio.sleep(0.1)

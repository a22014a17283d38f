"""What happens seldom, brought about for certain: each reason there is, and each route.

Every corner is a model of its own, so that nothing else that goes on decides what becomes of its
requests: workers that never answer are full for as long as a test takes, those that nobody else
asks are idle. What rests on an order asks one after the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from proxy.core.fleet.kv_links import FAILURES_TO_BAR
from proxy.core.model.route_table import BY_NAME, ROUTES, PromptFields
from proxy.core.model.types import Reason
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.raw_client import Client, bearer, chat, get, request
from vllm_sched.workers.launch import free_port

if TYPE_CHECKING:
    from tests.proxy.wire.fake_worker import Call, Script

STARTS_S = 120.0
LATE_S = 1.0
LONG, HANDED = "long " * 4000, "to be handed over " * 200
CHAT, STORED = "/v1/chat/completions", "/v1/responses/resp_1"
KEY = "sk-vs-of-the-chat-window"
BEARER = bearer(KEY)
# A third router: of another rule, with a queue for one, and targets that nobody can meet.
RULES = """
model: turn
workers:
{corners}
routing: {{policy: round_robin}}
router:
  port: {port}
  admin: {{port: {admin}}}
  probe: {{interval_s: 1}}
  queue: {{max_requests: 1, max_wait_s: 600}}
  admission: {{ttft_s: 0.001}}
"""
# The only question of boards, rules and alerts that has nothing to show in any scene, and why.
EMPTY = {'absent(up{job=~"(.*/)?router"})': "shows that no router is there"}
# Reasons that no scene shows, and why.
UNSEEN = {
    Reason.DRAINING: "of a router that stops, which is no longer ready to be scraped",
    Reason.ROUTER_FULL: "of a machine that has no files or ports left, for Prometheus neither",
}
# Where workers are: one listens nowhere, and is the only one that is to be down.
SPLIT = {
    "crowd-0": "general", "crowd-1": "general", "over-0": "long", "over-1": "short",
    "over-2": "short", "again-0": "general", "again-1": "general", "fails-0": "general",
    "fails-1": "general", "left-0": "general", "gone-0": "general",
}  # fmt: skip
PAIRS = {"night-0": "general", "shut-0": "prefill", "shut-1": "decode"}
OTHERS = {"turn-0": "general", "slow-0": "general", "full-0": "general", "ends-0": "general"}
GONE = "gone-0"
FULL = ("crowd", "over", "full")  # models whose workers take a request each


def seen() -> dict[str, str]:
    """Ask for every route and every reason that is not excused; and say what each question is."""
    asked = {f'proxy_requests_total{{route="{name}"}}': f"route {name}" for name in BY_NAME}
    return asked | {counted(each): f"reason {each}" for each in Reason if each not in UNSEEN}


def unseen() -> dict[str, str]:
    """Ask for those that are excused."""
    return {counted(reason): f"reason {reason}: {why}" for reason, why in UNSEEN.items()}


def counted(reason: Reason) -> str:
    """Ask whether anything was decided, or answered, for a reason."""
    return (
        f'proxy_decisions_total{{reason="{reason}"}} or proxy_requests_total{{reason="{reason}"}}'
    )


def every_route(**fields: object) -> list[bytes]:
    """Return a request for each path that passes through."""
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
    """Return the bytes of a form."""
    lead = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    body = b"".join(lead % (name.encode(), value) for name, value in fields.items()) + b"--b--\r\n"
    kind = b"Content-Type: multipart/form-data; boundary=b"
    head = [b"POST %b HTTP/1.1" % path.encode(), b"Host: router", *headers, kind]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body


async def begin_batch(port: int, bearer: bytes, body: Mapping[str, object]) -> None:
    """Have a batch of one line begun."""
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    file = form("/v1/files", bearer, purpose=b"batch", file=json.dumps(line).encode())
    client = await Client.connect(port)
    try:
        kept = (await client.ask(file, within=STARTS_S)).json()["id"]
        batch = {"input_file_id": kept, "endpoint": CHAT, "completion_window": "24h"}
        asked = request(json.dumps(batch).encode(), bearer, path="/v1/batches")
        assert (await client.ask(asked, within=STARTS_S)).status == 200
    finally:
        client.close()


async def late(call: Call) -> None:
    """Answer so late that what its prompt took is learnt to be much, however slow all else is."""
    await asyncio.sleep(LATE_S)
    await scripts.stream(2)(call)


class Corners:
    """Workers of models that nobody else asks for, and who asks for them."""

    def __init__(self, ports: Mapping[str, int], file: Path) -> None:
        self.file = file  # of the router that has RULES
        self._ports = ports
        self._fakes: dict[str, FakeWorker] = {}
        self._kv = Kv()
        self._refusals = self._losses = 0

    async def listen(self, stack: AsyncExitStack) -> dict[str, str]:
        """Be there; return the lines of the fleet files' `workers`, by the file."""
        fleets = {"split": SPLIT, "pairs": PAIRS, "rules": OTHERS}
        return {
            fleet: "\n".join([await self._worker(stack, *each) for each in workers.items()])
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
        most = ", max_requests: 1" if model in FULL else ""
        return f'  - {{name: {name}, role: {role}, model: {model}, url: "{url}"{most}}}'

    def _script(self, fake: FakeWorker, role: str) -> Script:
        model = fake.model
        if model == "shut":
            return self._prefills(fake) if role == "prefill" else self._decodes(fake)
        if model == "turn":
            return scripts.obey(model)
        if model == "again":
            return late
        if model == "fails":
            return self._fail_once
        if model == "slow":
            return self._hang_the_second_time
        return scripts.stall

    async def _fail_once(self, call: Call) -> None:
        asked = sum(len(self._fakes[name].served) for name in ("fails-0", "fails-1"))
        await (scripts.error(500) if asked == 1 else scripts.obey("served"))(call)

    def _prefills(self, fake: FakeWorker) -> Script:
        """Refuse what is long."""
        script = self._kv.worker(fake, "prefill")

        async def run(call: Call) -> None:
            refuses = LONG.encode() in call.body
            self._refusals += refuses
            await (scripts.error(400) if refuses else script)(call)

        return run

    def _decodes(self, fake: FakeWorker) -> Script:
        """Fail the first time that there are blocks to fetch for somebody."""
        script = self._kv.worker(fake, "decode")

        async def run(call: Call) -> None:
            fetches = HANDED.encode() in call.body and b"remote_block_ids" in call.body
            self._losses += fetches
            await (scripts.error(500) if fetches and self._losses == 1 else script)(call)

        return run

    async def _hang_the_second_time(self, call: Call) -> None:
        first = len(self._fakes["slow-0"].served) == 1
        await (late if first else scripts.stall)(call)

    async def visit(
        self, stack: AsyncExitStack, session: aiohttp.ClientSession, admins: Mapping[str, str]
    ) -> None:
        """Have everything happen, once; `admins` is where the routers' admin APIs are."""
        for url in admins.values():
            await self._settled(session, f"{url}/workers")
        await asyncio.gather(
            self._placed(stack), self._refused(), self._answered(), self._handed_over()
        )
        await self._by_rules(stack, session, f"{admins['rules']}/reload")
        await self._out_of_time(session, f"{admins['rules']}/reload")

    async def _placed(self, stack: AsyncExitStack) -> None:
        """Spill, have no choice, wait for too long, leave, try again, be where a prefix is."""
        for _ in range(2):
            await self._hang(stack, "split", chat(LONG, model="over"))
            await self._hang(stack, "split", chat(model="crowd"))
        for name in ("crowd-0", "crowd-1", "over-0"):
            await self._fakes[name].got(within=STARTS_S)
        assert await self._ask("split", chat(model="crowd")) == 429
        async with AsyncExitStack() as soon:
            await self._hang(soon, "split", chat(model="left", stream=True))
            await self._fakes["left-0"].got(within=STARTS_S)
        assert await self._ask("split", chat(model="fails")) == 200
        for _ in range(2):
            assert await self._ask("split", chat(LONG, model="again", stream=True)) == 200

    async def _refused(self) -> None:
        """Ask for what there is not, or not for everybody."""
        ids = json.dumps({"model": "crowd", "prompt": [1] * 20_000, "max_tokens": 2}).encode()
        assert await self._ask("split", request(ids, path="/v1/completions")) == 400
        assert await self._ask("split", request(b"{")) == 400
        assert await self._ask("split", get("/nowhere")) == 404
        assert await self._ask("rules", chat(model="nobodys")) == 404
        assert await self._ask("split", chat(model="nobodys")) == 503  # or is it one of GONE's?
        assert await self._ask("split", chat(model="gone")) == 503
        assert await self._ask("pairs", chat()) == 401
        assert await self._ask("pairs", get(STORED, BEARER)) == 404

    async def _answered(self) -> None:
        """Ask what is not handed over; begin a batch whose one line never ends."""
        embed = json.dumps({"model": "tiny", "input": "hi"}).encode()
        await self._ask("pairs", request(embed, BEARER, path="/v1/embeddings"))
        body = {"model": "night", "messages": [{"role": "user", "content": "hi"}]}
        await begin_batch(self._ports["pairs"], BEARER, body)
        await self._fakes["night-0"].got(within=STARTS_S)

    async def _handed_over(self) -> None:
        """Lose blocks that nobody will fetch; have a worker refuse what another then serves."""
        number = count()  # or a prompt is cached where it was decoded
        async with asyncio.timeout(STARTS_S):
            while not self._losses:  # until the two are connected all of it is decoded whole
                await self._ask("pairs", chat(f"{next(number)} {HANDED}", BEARER, model="shut"))
            while self._refusals < FAILURES_TO_BAR:
                await self._ask("pairs", chat(f"{next(number)} {LONG}", BEARER, model="shut"))

    async def _by_rules(
        self, stack: AsyncExitStack, session: aiohttp.ClientSession, reload: str
    ) -> None:
        """Be placed by other rules; come where nobody can be quick, and where nobody may wait."""
        assert await self._ask("rules", chat(model="turn")) == 200
        self.file.write_text(self.file.read_text().replace("round_robin", "least_loaded"))
        async with session.post(reload) as answer:
            assert answer.status == 200, await answer.text()
        assert await self._ask("rules", chat(model="turn")) == 200
        assert await self._ask("rules", chat(LONG, model="slow", stream=True)) == 200
        await self._hang(stack, "rules", chat(LONG, model="slow"))
        await self._fakes["slow-0"].got(2, within=STARTS_S)
        assert await self._ask("rules", chat(model="slow")) == 429
        # One has the worker, one the queue, whichever they are.
        asked = [asyncio.create_task(self._ask("rules", chat(model="full"))) for _ in range(3)]
        for each in asked:
            stack.callback(each.cancel)
        [refused], _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result() == 429

    async def _out_of_time(self, session: aiohttp.ClientSession, reload: str) -> None:
        """Take too long for an answer, and to send a body."""
        said = self.file.read_text()
        limits = "  timeouts: {request_s: 2, client_idle_s: 1}\n"
        self.file.write_text(said.replace("router:\n", f"router:\n{limits}"))
        async with session.post(reload) as answer:
            assert answer.status == 200, await answer.text()
        assert await self._ask("rules", chat(model="ends")) == 504
        assert await self._ask("rules", chat(model="ends")[:-1]) == 408

    async def _ask(self, router: str, data: bytes) -> int:
        """Ask once; return the status."""
        client = await Client.connect(self._ports[router])
        try:
            return (await client.ask(data, within=STARTS_S)).status
        finally:
            client.close()

    async def _hang(self, stack: AsyncExitStack, router: str, data: bytes) -> None:
        """Ask somebody who never answers, and stay."""
        client = await Client.connect(self._ports[router])
        stack.callback(client.close)
        await client.send(data)

    async def _settled(self, session: aiohttp.ClientSession, url: str) -> None:
        """Wait until a router knows of each worker whether it is there."""
        async with asyncio.timeout(STARTS_S):
            while True:
                async with session.get(url) as answer:
                    states = {each["name"]: each["state"] for each in await answer.json()}
                if all((name == GONE) == (state != "up") for name, state in states.items()):
                    return
                await asyncio.sleep(0.1)

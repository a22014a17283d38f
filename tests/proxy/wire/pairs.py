"""A router before prefill and decode workers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

from proxy.core.fleet.leases import Decision
from proxy.core.model.role import Role
from proxy.core.model.route_table import Route
from proxy.core.model.types import ReceivedRequest
from proxy.core.request import route_lookup
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.kv import CHAT, Kv, answer_to, prompts_of
from tests.proxy.wire.raw_client import Answer, Client, request
from tests.proxy.wire.scripts import DONE
from tests.proxy.wire.site import Fake, Site, eventually

ROUTER = {"transfer": True, "disaggregate_above": 1, "retry_budget": 10.0}
numbers = itertools.count(1)


class Pairs:
    """Prefill workers, decode workers, and the blocks between them."""

    def __init__(self, site: Site, kv: Kv) -> None:
        self.site, self.kv = site, kv
        self.left = 0  # blocks that are to be held at the end
        site.checks_at_end.append(self.check_blocks)

    def explain(self, body: bytes, path: str = CHAT) -> Decision:
        """Return the decision about a request."""
        route = route_lookup.find("POST", path)
        assert isinstance(route, Route)
        info = self.site.router.read(ReceivedRequest(route, body, b"application/json", "id"))
        decision = self.site.router.placer.explain(info, self.site.clock())  # type: ignore[arg-type]
        assert isinstance(decision, Decision)
        return decision

    def victim(self, role: Role, body: bytes, path: str = CHAT) -> FakeWorker:
        """Return the worker of a role that would get a request."""
        decision = self.explain(body, path)
        assert decision.handover is not None
        worker = decision.handover.prefill if role is Role.PREFILL else decision.worker
        return self.site.fakes[worker.name]

    async def send(self, body: bytes, path: str = CHAT, **options: Any) -> Client:
        """Send a request; its response is not read yet."""
        return await self.site.send(request(body, path=path), **options)

    async def check_served(
        self, body: bytes | None = None, *headers: bytes, path: str = CHAT, **fields: Any
    ) -> None:
        """Check that a request, by default a chat, gets its whole response."""
        body = chat_body(**fields) if body is None else body
        assert words(await ask(self, body, *headers, path=path)) == expected(body)
        await self.settled()

    def kinds(self) -> list[str]:
        """Return the kinds of legs in order, without releases."""
        return [leg.split()[0] for leg in self.legs() if "release" not in leg]

    def legs(self) -> list[str]:
        """Return the kinds and workers of legs in order."""
        return [f"{_kind(call.json())} {name}" for name, call in self._calls()]

    def hold(self, name: str) -> asyncio.Event:
        """Answer the next call to a worker once the returned event is set."""
        fake = self.site.fakes[name]
        return fake.hold_next(self.kv.worker(fake, self.site.worker(name).role.value))

    def halve(
        self, name: str, cut: Callable[[bytes], int] = lambda answer: len(answer) // 2
    ) -> asyncio.Event:
        """Answer the next call to a worker in two parts, the second once the event is set."""
        fake, rest = self.site.fakes[name], asyncio.Event()
        usual = self.kv.worker(fake, self.site.worker(name).role.value)

        async def answer_in_two(call: Call) -> None:
            send, sent = call.connection.send, bytearray()

            async def collect(data: bytes) -> None:
                sent.extend(data)

            call.connection.send = collect  # type: ignore[method-assign]
            await usual(call)
            call.connection.send = send  # type: ignore[method-assign]
            at = cut(bytes(sent))
            await call.send(bytes(sent[:at]))
            await rest.wait()
            await call.send(bytes(sent[at:]))

        fake.then(answer_in_two)
        return rest

    def prefill_has_begun(self) -> bool:
        """Whether the router has part of a prefill's response."""
        attempts = [exchange._attempt for exchange in self.site.wire.exchanges]
        handovers = [attempt and attempt.handover for attempt in attempts]
        return any(handover is not None and handover.is_answering for handover in handovers)

    def _calls(self) -> list[tuple[str, Any]]:
        calls = [(name, call) for name, f in self.site.fakes.items() for call in f.served]
        return sorted(calls, key=lambda pair: pair[1].arrived)

    async def settled(self, *, left: int = 0) -> None:
        """Wait until nothing runs; check that `left` blocks are held and no faults are recorded."""
        self.left = left
        await self.site.settled()
        self.check_blocks()

    def check_blocks(self) -> None:
        """Check that no faults are recorded, and that `left` blocks are held."""
        assert self.kv.faults == []
        assert len(self.kv.held) == self.left


def _kind(body: dict[str, Any]) -> str:
    params = body.get("kv_transfer_params") or {}
    if params.get("do_remote_decode"):
        return "prefill"
    if str(body.get("model")).startswith("vllm-sched:"):
        return "release"
    return "decode" if params.get("do_remote_prefill") else "whole"


async def pairs(
    start: Start,
    *more: Fake,
    prefills: int = 2,
    decodes: int = 2,
    max_model_len: int = 16384,
    wire: dict[str, Any] | None = None,
    **router: Any,
) -> Pairs:
    """Start a router, prefill workers and decode workers."""
    fakes = [Fake(f"p{n}", Role.PREFILL, max_model_len=max_model_len) for n in range(prefills)]
    fakes += [Fake(f"d{n}", Role.DECODE, max_model_len=max_model_len) for n in range(decodes)]
    site = await start(*fakes, *more, router=ROUTER | router, wire=wire or {})
    kv = Kv()
    for spec in (*fakes, *more):
        fake = site.fakes[spec.name]
        fake.always(kv.worker(fake, spec.role.value))
    return Pairs(site, kv)


async def start_between_legs(start: Start, **options: Any) -> tuple[Pairs, Client, FakeWorker]:
    """Send a request whose decode leg waits for a connection; return its decode worker too."""
    here = await pairs(start, prefills=1, decodes=2, **options)
    here.site.stand_still()  # so that connect does not time out
    body = chat_body()
    victim = here.victim(Role.DECODE, body)
    await victim.hang()
    client = await here.send(body)
    await eventually(lambda: here.kv.pinned)
    await eventually(lambda: here.site.worker("p0").requests == 0)
    return here, client, victim


def chat_body(**fields: Any) -> bytes:
    """Return the body of a chat with a new prompt."""
    messages = [{"role": "user", "content": f"number {next(numbers)}: " + "x" * 200}]
    return json.dumps({"model": "tiny", "messages": messages, "max_tokens": 4} | fields).encode()


def completion_body(**fields: Any) -> bytes:
    """Return the body of a completion with a new prompt."""
    prompt = f"number {next(numbers)}: " + "y" * 200
    return json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4} | fields).encode()


async def ask(pairs: Pairs, body: bytes, *headers: bytes, path: str = CHAT) -> Answer:
    """Send a request."""
    return await pairs.site.ask(request(body, *headers, path=path))


def words(answer: Answer) -> list[str]:
    """Return the tokens of a response with one choice."""
    assert answer.status == 200, answer.body
    if answer.body.startswith(b"data: "):
        assert answer.body.endswith(DONE), answer.body
        found = [json.loads(e[6:]) for e in answer.body.split(b"\n\n")[:-2]]
        return [text_of(choice) for event in found for choice in event["choices"]]
    text = text_of(answer.json()["choices"][0])
    return [word + " " for word in text.split()]


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice or of a delta."""
    inner = choice.get("message") or choice.get("delta")
    return str(inner["content"] if inner is not None else choice["text"])


def expected(body: bytes, tokens: int = 4) -> list[str]:
    """Return the tokens of the response to a body with one prompt."""
    return answer_to(prompts_of(json.loads(body))[0], tokens)

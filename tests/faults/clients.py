"""Random clients that record the outcome of every request."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.proxy.wire import scripts
from tests.proxy.wire.kv import CHAT, COMPLETIONS, answer_to, prompts_of
from tests.proxy.wire.raw_client import Answer, BrokenError, Client, bearer, request

WHOLE, REFUSED, TORN, LEFT, NO_ROUTER = "whole", "refused", "torn", "left", "no router"
# Longer than the router's worker timeouts, queue wait and retries together.
MAX_ANSWER_S = 30.0
REFUSALS = {429, 500, 502, 503, 504}
TOO_SLOW = 408  # for a body sent byte by byte
DRIPPED_SHARE, DRIP_S = 0.02, 0.25  # share of such requests, time per byte
# uvloop raises RuntimeError for a transport that was just closed.
DISCONNECTED = (
    BrokenError,
    ConnectionError,
    ssl.SSLError,
    asyncio.IncompleteReadError,
    RuntimeError,
)


class WrongAnswerError(AssertionError):
    """A response that is neither complete nor visibly incomplete."""


@dataclass
class ClientLoad:
    """Clients of one router, and the outcomes of their requests."""

    port: int
    seed: int
    model: str = "tiny"
    sizes: tuple[int, ...] = (10, 200, 200, 2000, 20_000, 300_000)  # maximum prompt sizes
    timeout_s: float = MAX_ANSWER_S
    keys: tuple[str, ...] = ()  # of tenants, chosen at random
    tls: ssl.SSLContext | None = None
    dripped: float = DRIPPED_SHARE
    judge: Callable[[Answer, list[str]], str] = field(default_factory=lambda: classify)
    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    sent: int = 0
    playing: list[asyncio.Task[None]] = field(default_factory=list)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, clients: int) -> None:
        self.playing += [
            asyncio.create_task(self.play(n, self._over.is_set)) for n in range(clients)
        ]

    async def end(self) -> None:
        self._over.set()
        await asyncio.gather(*self.playing)
        assert self.wrong == []

    async def play(self, number: int, over: Callable[[], bool]) -> None:
        """Run one client after another until `over`."""
        dice = random.Random(self.seed * 10_007 + number)
        while not over():
            try:
                rcvbuf = 4096 if dice.random() < 0.1 else None
                client = await Client.connect(self.port, rcvbuf=rcvbuf, tls=self.tls)
            except (OSError, RuntimeError):
                self.outcomes[NO_ROUTER] += 1
                await asyncio.sleep(0.05)
                continue
            try:
                while not over() and await self._once(client, dice):
                    if dice.random() < 0.3:
                        break
            finally:
                client.close()

    async def _once(self, client: Client, dice: random.Random) -> bool:
        """Send one request; return whether the connection may be used again."""
        self.sent += 1
        began = time.monotonic()
        try:
            outcome, again = await self._ask(client, dice)
        except TimeoutError:
            waited = time.monotonic() - began
            self.wrong.append(f"no end after {waited:.0f} s of {self.timeout_s:g} s")
            outcome, again = "hangs", False
        except (WrongAnswerError, AssertionError, ValueError) as error:
            self.wrong.append(repr(error)[:500])
            outcome, again = "wrong", False
        self.outcomes[outcome] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return again

    async def _ask(self, client: Client, dice: random.Random) -> tuple[str, bool]:
        path = dice.choice((CHAT, CHAT, COMPLETIONS))
        size = dice.choice(self.sizes)
        text = f"{dice.random()} " + "x" * dice.randrange(size)
        tokens = dice.choice((1, 2, 5, 30))
        body: dict[str, object] = {"model": self.model, "max_tokens": tokens}
        body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {
            "prompt": text
        }  # fmt: skip
        if dice.random() < 0.6:
            body["stream"] = True
        data = json.dumps(body).encode()
        chunks = (7, 4096) if dice.random() < 0.1 else None
        headers = [bearer(dice.choice(self.keys))] if self.keys else []
        data_sent = request(data, *headers, path=path, chunks=chunks)
        try:
            if dice.random() < self.dripped:
                return await self._drip(client, data_sent)
            await self._send(client, data_sent, dice)
            if dice.random() < 0.12:
                await asyncio.sleep(dice.random() * dice.choice((0.01, 0.2, 1.0)))
                if dice.random() < 0.5 and not client.writer.is_closing():
                    client.reset()
                return LEFT, False
            answer = await client.answer(within=self.timeout_s)
        except DISCONNECTED:
            return TORN, False
        self.statuses[answer.status] += 1
        outcome = self.judge(answer, answer_to(prompts_of(body)[0], tokens))
        closes = b"close" in answer.all(b"connection")
        return outcome, outcome in (WHOLE, REFUSED) and not closes

    async def _drip(self, client: Client, data: bytes) -> tuple[str, bool]:
        """Send a body byte by byte until the router refuses it."""
        at = data.index(b"\r\n\r\n") + 5
        await client.send(data[:at], within=MAX_ANSWER_S)
        answer = asyncio.create_task(client.answer(within=self.timeout_s))
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=DRIP_S)
                client.writer.write(data[at : at + 1])
                at += 1
        finally:
            answer.cancel()
        status = (await answer).status
        if status != TOO_SLOW and status not in REFUSALS:
            raise WrongAnswerError(f"{status} for an incomplete body")
        self.statuses[status] += 1
        return REFUSED, False

    async def _send(self, client: Client, data: bytes, dice: random.Random) -> None:
        if dice.random() < 0.8:
            await client.send(data, within=MAX_ANSWER_S)
            return
        at = dice.randrange(len(data))
        await client.send(data[:at], within=MAX_ANSWER_S)
        await asyncio.sleep(dice.random() * 0.1)
        await client.send(data[at:], within=MAX_ANSWER_S)


def classify(answer: Answer, expected: list[str]) -> str:
    """Return whether an answer is whole, refused or torn; raise if it is wrong."""
    if answer.status != 200:
        if answer.status not in REFUSALS:
            raise WrongAnswerError(answer)
        if b"error" not in answer.body:
            raise WrongAnswerError(answer)
        return REFUSED
    if not answer.one(b"content-type").startswith(scripts.SSE[:17]):
        if text_of(answer.json()["choices"][0]) != "".join(expected):
            raise WrongAnswerError(answer)
        return WHOLE
    *events, rest = answer.body.split(b"\n\n")
    if rest:
        raise WrongAnswerError(answer)
    whole = bool(events) and events[-1] + b"\n\n" == scripts.DONE
    last = events.pop() if events else b""
    if not whole and b'"error"' not in last:
        raise WrongAnswerError(answer)
    texts = [text_of(json.loads(event[6:])["choices"][0]) for event in events]
    if texts != (expected if whole else expected[: len(texts)]):
        raise WrongAnswerError(answer)
    return WHOLE if whole else TORN


def text_of(choice: dict[str, dict[str, str]]) -> str:
    inner = choice.get("message") or choice.get("delta")
    return str(inner["content"] if inner is not None else choice["text"])

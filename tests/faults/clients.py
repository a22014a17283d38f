"""Clients of all manners, each of which says what became of every request."""

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

WHOLE, REFUSED, TORN, LEFT, NOBODY = "whole", "refused", "torn", "left", "nobody there"
# Beyond the router's own patience with workers, its queue and all its retries.
HANGS_S = 30.0
REFUSALS = {429, 500, 502, 503, 504}
TOO_SLOW = 408  # for a body that comes a byte at a time
DRIPPED, DRIP_S = 0.02, 0.25  # the share of requests that are sent so, and a byte's time
# The last is uvloop's word for a transport that was closed just now.
GONE = (BrokenError, ConnectionError, ssl.SSLError, asyncio.IncompleteReadError, RuntimeError)


class WrongError(AssertionError):
    """An answer that is neither whole nor visibly not."""


@dataclass
class Crowd:
    """Clients of one router, and the outcomes of their requests."""

    port: int
    seed: int
    model: str = "tiny"
    sizes: tuple[int, ...] = (10, 200, 200, 2000, 20_000, 300_000)  # of prompts, at most
    patience_s: float = HANGS_S
    keys: tuple[str, ...] = ()  # of tenants, whose requests these are in turn
    tls: ssl.SSLContext | None = None
    dripped: float = DRIPPED
    judge: Callable[[Answer, list[str]], str] = field(default_factory=lambda: judged)
    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    sent: int = 0

    async def play(self, number: int, over: Callable[[], bool]) -> None:
        """Be one client after another until it is over."""
        dice = random.Random(self.seed * 10_007 + number)
        while not over():
            try:
                rcvbuf = 4096 if dice.random() < 0.1 else None
                client = await Client.connect(self.port, rcvbuf=rcvbuf, tls=self.tls)
            except (OSError, RuntimeError):
                self.outcomes[NOBODY] += 1
                await asyncio.sleep(0.05)
                continue
            try:
                while not over() and await self._once(client, dice):
                    if dice.random() < 0.3:
                        break
            finally:
                client.close()

    async def _once(self, client: Client, dice: random.Random) -> bool:
        """Ask once; returns whether the connection may be used again."""
        self.sent += 1
        began = time.monotonic()
        try:
            outcome, again = await self._ask(client, dice)
        except TimeoutError:
            waited = time.monotonic() - began
            self.wrong.append(f"no end after {waited:.0f} s, of {self.patience_s:g} s of patience")
            outcome, again = "hangs", False
        except (WrongError, AssertionError, ValueError) as error:
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
        shown = [bearer(dice.choice(self.keys))] if self.keys else []
        whole = request(data, *shown, path=path, chunks=chunks)
        try:
            if dice.random() < self.dripped:
                return await self._drip(client, whole)
            await self._send(client, whole, dice)
            if dice.random() < 0.12:
                await asyncio.sleep(dice.random() * dice.choice((0.01, 0.2, 1.0)))
                if dice.random() < 0.5 and not client.writer.is_closing():
                    client.reset()
                return LEFT, False
            answer = await client.answer(within=self.patience_s)
        except GONE:
            return TORN, False
        self.statuses[answer.status] += 1
        outcome = self.judge(answer, answer_to(prompts_of(body)[0], tokens))
        closes = b"close" in answer.all(b"connection")
        return outcome, outcome in (WHOLE, REFUSED) and not closes

    async def _drip(self, client: Client, data: bytes) -> tuple[str, bool]:
        """Send a body a byte at a time, until the router has had enough of that."""
        at = data.index(b"\r\n\r\n") + 5
        await client.send(data[:at], within=HANGS_S)
        answer = asyncio.create_task(client.answer(within=self.patience_s))
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=DRIP_S)
                client.writer.write(data[at : at + 1])
                at += 1
        finally:
            answer.cancel()
        status = (await answer).status
        if status != TOO_SLOW and status not in REFUSALS:
            raise WrongError(f"{status} for a body that never came whole")
        self.statuses[status] += 1
        return REFUSED, False

    async def _send(self, client: Client, data: bytes, dice: random.Random) -> None:
        if dice.random() < 0.8:
            await client.send(data, within=HANGS_S)
            return
        at = dice.randrange(len(data))
        await client.send(data[:at], within=HANGS_S)
        await asyncio.sleep(dice.random() * 0.1)
        await client.send(data[at:], within=HANGS_S)


def judged(answer: Answer, expected: list[str]) -> str:
    """Say whether an answer is whole or says that it is not; there is nothing between."""
    if answer.status != 200:
        if answer.status not in REFUSALS:
            raise WrongError(answer)
        if b"error" not in answer.body:
            raise WrongError(answer)
        return REFUSED
    if not answer.one(b"content-type").startswith(scripts.SSE[:17]):
        if said(answer.json()["choices"][0]) != "".join(expected):
            raise WrongError(answer)
        return WHOLE
    *events, rest = answer.body.split(b"\n\n")
    if rest:
        raise WrongError(answer)
    whole = bool(events) and events[-1] + b"\n\n" == scripts.DONE
    last = events.pop() if events else b""
    if not whole and b'"error"' not in last:
        raise WrongError(answer)
    texts = [said(json.loads(each[6:])["choices"][0]) for each in events]
    if texts != (expected if whole else expected[: len(texts)]):
        raise WrongError(answer)
    return WHOLE if whole else TORN


def said(choice: dict[str, dict[str, str]]) -> str:
    """Read the text of a choice or of a piece of one."""
    inner = choice.get("message") or choice.get("delta")
    return str(inner["content"] if inner is not None else choice["text"])

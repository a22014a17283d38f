"""Requests that leave a drained worker at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.core.request.continuable import FIELD, NO_WORKER, NOT_KEPT, WAITS
from proxy.wire.exchange import moves
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.test_continuation import WORDS, Engines, text_of, with_journals
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import Fake, Site, eventually


async def drain(site: Site, name: str, within_s: float = 5.0) -> tuple[int, Mapping[str, int]]:
    site.fleet.roster.drain(name)
    return await site.wire.moves.leave(name, within_s)


class Paced(Engines):
    """Engines that pause."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = asyncio.Event()

    def serve_slowly(self, own: int) -> Script:
        """Return a script that pauses after that many tokens of its own until `steps` is set."""

        async def run(call: Call) -> None:
            body = call.json()
            self.asked.append(body)
            request_id = call.all(b"x-request-id")[0].decode()
            so_far = list(body.get("vllm_xargs", {}).get("output_so_far", ()))
            await call.send(scripts.STREAM_HEAD)
            text = "".join(self.words[number] for number in so_far)
            for number in range(len(so_far), len(self.words)):
                if number == len(so_far) + own:
                    await self.steps.wait()
                self.published[request_id] = [*range(number + 1)]
                last = number + 1 == len(self.words)
                text += self.words[number]
                await call.send(scripts.chunk(self.event(self.piece(text), last=last)))
                text = ""
            usage = scripts.usage_event(7, len(self.words))
            await call.send(scripts.chunk(usage) + scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)

        return run


async def paced(start: Start, *, spare: Fake | None = None, **options: Any) -> tuple[Site, Paced]:
    """Start a router before two workers that pause after four tokens."""
    site, engines = await start(Fake("w0"), spare or Fake("w1"), **options), Paced()
    with_journals(site, engines)
    site.always(engines.serve_slowly(4))
    return site, engines


async def streaming(site: Site, engines: Paced, count: int, **fields: Any) -> list[Client]:
    """Start streams that have paused after some tokens."""
    clients = [await site.send(chat(stream=True, **fields)) for _ in range(count)]
    await eventually(lambda: len(engines.published) == count)
    await eventually(lambda: all(len(each) == 4 for each in engines.published.values()))
    await site.swept()
    return clients


async def test_streams_go_on_elsewhere(start: Start) -> None:
    site, engines = await paced(start, router={"retry_budget": 0.0, "max_attempts": 1})
    clients = await streaming(site, engines, 12)
    before = site.worker("w0").requests
    assert before > 0
    moved, remaining = await drain(site, "w0")
    assert (moved, remaining) == (before, {})
    assert (site.worker("w0").requests, site.worker("w1").requests) == (0, 12)
    engines.steps.set()
    for client in clients:
        text, events = await text_of(client)
        assert text == "".join(WORDS)
        assert len({event["id"] for event in events}) == 1
        assert events[-1]["usage"] == scripts.usage(7, len(WORDS))
    worker = site.worker("w0")
    assert worker.breaker.has_no_failures
    assert site.metrics.retries == {("w0", "drained"): before}
    assert site.metrics.continuations == {"w0": before}
    assert site.metrics.lost_streams == {}
    await site.settled()


async def test_a_stream_moves_again_and_again(start: Start) -> None:
    """More often than a request may fail."""
    site, engines = await paced(start, router={"retry_budget": 0.0, "max_attempts": 1})
    [client] = await streaming(site, engines, 1)
    for tokens in (8, 12, 13):
        [name] = [name for name in site.fakes if site.worker(name).requests]
        assert await drain(site, name) == (1, {})
        site.fleet.roster.drain(name, draining=False)
        await eventually(lambda tokens=tokens: [*map(len, engines.published.values())] == [tokens])  # type: ignore[misc]
    engines.steps.set()
    assert (await text_of(client))[0] == "".join(WORDS)
    assert len(engines.asked) == 4
    await site.settled()


async def test_requests_without_a_byte_are_placed_anew(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), router={"retry_budget": 0.0, "max_attempts": 1})
    gate = site.hold()
    clients = [await site.send(chat()) for _ in range(6)]
    await eventually(lambda: len(site.served()) == 6)
    before = site.worker("w0").requests
    assert await drain(site, "w0") == (before, {})
    await eventually(lambda: len(site.fakes["w1"].served) == 6)
    gate.set()
    for client in clients:
        assert (await client.answer()).status == 200
    await site.settled()


@pytest.mark.parametrize("case", ["field", "no journal here", "no journal elsewhere", "full"])
async def test_what_cannot_move_ends_on_the_drained_worker(start: Start, case: str) -> None:
    site, engines = await paced(start, spare=Fake("w1", max_requests=1))
    site.fleet.roster.drain("w1")
    clients = await streaming(site, engines, 3, **({"seed": 1} if case == "field" else {}))
    site.fleet.roster.drain("w1", draining=False)
    if case == "no journal here":
        for exchange in site.wire.exchanges:
            exchange.sent_text = None  # type: ignore[attr-defined]
    if case == "no journal elsewhere":
        site.worker("w1").reports_prefixes = False
    moved, remaining = await drain(site, "w0", 0.2)
    assert (moved, remaining) == {
        "field": (0, {FIELD: 3}),
        "no journal here": (0, {NOT_KEPT: 3}),
        "no journal elsewhere": (0, {NO_WORKER: 3}),
        "full": (1, {NO_WORKER: 2}),
    }[case]
    engines.steps.set()
    for client in clients:
        assert (await text_of(client))[0] == "".join(WORDS)
    assert site.metrics.lost_streams == {}
    await site.settled()


async def test_a_sweep_moves_a_few(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MAX_MOVES_PER_SWEEP", 2)
    site, engines = await paced(start)
    site.fleet.roster.drain("w1")
    clients = await streaming(site, engines, 9)
    site.fleet.roster.drain("w1", draining=False)
    moved, remaining = await drain(site, "w0", 0.0)
    assert (moved, remaining) == (2, {WAITS: 7})
    await eventually(lambda: site.worker("w1").requests == 9)
    engines.steps.set()
    for client in clients:
        assert (await text_of(client))[0] == "".join(WORDS)
    await site.settled()


async def test_a_worker_that_is_used_again_keeps_its_streams(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MAX_MOVES_PER_SWEEP", 1)
    site, engines = await paced(start)
    site.fleet.roster.drain("w1")
    clients = await streaming(site, engines, 5)
    site.fleet.roster.drain("w1", draining=False)
    await drain(site, "w0", 0.0)
    site.fleet.roster.drain("w0", draining=False)
    await site.swept()
    await site.swept()
    assert site.worker("w0").requests == 4
    engines.steps.set()
    for client in clients:
        assert (await text_of(client))[0] == "".join(WORDS)
    await site.settled()

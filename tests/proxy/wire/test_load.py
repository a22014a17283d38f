"""Load counts from the moment a request is sent, in tokens, and spreads."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.types import Role
from tests.proxy.wire import scripts
from tests.proxy.wire.client import chat
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Script
from tests.proxy.wire.site import Fake, Site, eventually


async def send(site: Site, *requests: bytes) -> None:
    """Send requests at once, each on a connection of its own, and wait until workers have them."""
    before = len(site.served())
    for data in requests:
        await (await site.client()).send(data)
    await eventually(lambda: len(site.served()) == before + len(requests))


def loads(site: Site) -> list[int]:
    return [len(fake.served) for fake in site.fakes.values()]


async def test_a_burst_of_longs_spreads_though_none_has_answered(start: Start) -> None:
    """In a peer all go to the first worker: it counts load once a response starts."""
    site = await start(Fake("w0"), Fake("w1"), Fake("w2"))
    site.always(scripts.stall)
    await send(site, *(chat(f"{n} " + "word " * 8000) for n in range(12)))
    assert loads(site) == [4, 4, 4]


async def test_load_is_tokens_and_not_requests(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.stall)
    await send(site, chat("a " + "word " * 8000))
    await send(site, *(chat(f"short {n}") for n in range(6)))
    long_at = max(range(2), key=lambda n: sum(len(c.body) for c in list(site.fakes.values())[n].served))
    assert loads(site)[1 - long_at] >= 5


@pytest.mark.parametrize("answer", [scripts.stall, scripts.stream(1, end="stall")])
async def test_one_prefix_does_not_draw_all_to_one_worker(start: Start, answer: Script) -> None:
    """The death spiral of prefix affinity: one worker drowns while others idle."""
    site = await start(Fake("w0"), Fake("w1"))
    system = "you are a helpful assistant. " * 300
    for _ in range(5):
        assert (await site.ask(chat(system))).status == 200
    for fake in site.fakes.values():
        fake.calls.clear()
    site.always(answer)
    for number in range(80):
        await send(site, chat(f"{system}question {number}", stream=True, max_tokens=500))
    assert min(loads(site)) >= 10


async def test_a_prefix_brings_the_next_question_to_the_same_worker(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), Fake("w2"))
    for talk in range(5):
        text = f"conversation {talk}: " + f"word {talk} " * 1500
        for turn in range(4):
            text += f" and question {turn}"
            assert (await site.ask(chat(text))).status == 200
        talked = [
            name
            for name, fake in site.fakes.items()
            for call in fake.served
            if f"conversation {talk}:".encode() in call.body
        ]
        assert max(map(talked.count, talked)) >= 3


async def test_what_was_charged_goes_down_as_tokens_come(start: Start) -> None:
    site = await start(Fake("w0"))
    gate = asyncio.Event()
    site.fake.then(scripts.gated(gate, scripts.stream(10, end="stall")))
    client = await site.client()
    await client.send(chat("word " * 400, stream=True, max_tokens=100))
    await site.fake.got()
    worker = site.worker()
    assert (worker.requests, worker.decoding) == (1, 0)
    assert worker.prefill_tokens > 300
    assert worker.decode_tokens > 50
    before = worker.decode_tokens
    gate.set()
    await eventually(lambda: worker.prefill_tokens == 0 and worker.decoding == 1)
    await eventually(lambda: worker.decode_tokens in (before - 10, before - 9))
    assert worker.requests == 1


@pytest.mark.parametrize("policy", ["adaptive", "length"])
async def test_shorts_do_not_go_behind_longs(start: Start, policy: str) -> None:
    site = await start(
        Fake("s0", role=Role.SHORT),
        Fake("l0", role=Role.LONG, max_model_len=131072),
        router={"policy": policy},
    )
    site.fakes["l0"].always(scripts.stall)
    await send(site, chat("word " * 20_000), chat("words " * 20_000))
    assert loads(site) == [0, 2]
    answers = await asyncio.gather(*(site.ask(chat(f"short {n}")) for n in range(20)))
    assert {answer.status for answer in answers} == {200}
    assert loads(site) == [20, 2]

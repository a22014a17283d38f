"""A request that was sent to a worker whose context is too short for it, by an estimate too low."""

from __future__ import annotations

import pytest

from proxy.core.types import Role
from proxy.wire.relay import MOST_SAID
from tests.proxy.wire import scripts
from tests.proxy.wire.client import chat
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.site import Fake, Site, eventually

SHORT = Fake("short", Role.SHORT, max_model_len=12288)
LONG = Fake("long", Role.LONG, max_model_len=131072)
WORDS = [
    "This model's maximum context length is 12288 tokens. However, your prompt contains 15000 "
    "input tokens, which exceeds this limit even without any output tokens.",
    "The decoder prompt (length 15000) is longer than the maximum model length of 12288.",
]


async def fleet(start: Start, *more: Fake, **settings: float) -> Site:
    """Start a fleet in which a small request goes to the short worker; no retry is granted."""
    return await start(SHORT, LONG, *more, router={"retry_budget": 0.0, **settings})


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_larger_worker_is_asked(start: Start, words: str, stream: bool) -> None:
    site = await fleet(start)
    site.fakes["short"].always(scripts.error(400, words))
    answer = await site.ask(chat(stream=stream))
    assert answer.status == 200
    assert [call.connection.worker.name for call in site.served()] == ["short", "long"]
    assert site.served()[0].body == site.served()[1].body
    assert site.worker("short").breaker.spotless


async def test_it_is_asked_though_the_refusal_comes_in_pieces(start: Start) -> None:
    site = await fleet(start)
    head = scripts.head(400, (b"content-type", b"application/json"), (b"content-length", b"40"))
    site.fakes["short"].always(scripts.drip(head + b"maximum context length".ljust(40)))
    assert (await site.ask(chat())).status == 200


async def test_the_largest_has_the_last_word(start: Start) -> None:
    site = await fleet(start, Fake("middle", Role.GENERAL, max_model_len=16384))
    site.always(scripts.error(400, WORDS[0]))
    site.fakes["long"].always(scripts.error(400, "maximum context length is 131072"))
    answer = await site.ask(chat())
    assert (answer.status, answer.error()["message"]) == (400, "maximum context length is 131072")
    limits = [site.worker(call.connection.worker.name).limit for call in site.served()]
    assert limits == sorted(set(limits))


async def test_it_waits_for_one_that_is_full(start: Start) -> None:
    full = Fake("long", Role.LONG, max_model_len=131072, max_requests=1)
    site = await start(SHORT, full, router={"policy": "length", "short_limit": 1000})
    site.fakes["short"].always(scripts.error(400, WORDS[0]))
    site.fakes["long"].then(scripts.stall)
    first, second = await site.client(), await site.client()
    await first.send(chat("x" * 20_000))
    await eventually(lambda: site.fakes["long"].served)
    await second.send(chat())
    await eventually(lambda: site.router.queue.length == 1)
    first.close()
    assert (await second.answer()).status == 200


async def test_what_else_is_refused_is_final(start: Start) -> None:
    site = await fleet(start)
    for words in ("no such role", "maximum context length".rjust(2 * MOST_SAID, "x")):
        site.fakes["short"].then(scripts.error(400, words, (b"x-detail", b"1")))
        answer = await site.ask(chat())
        assert (answer.status, answer.error()["message"]) == (400, words)
        assert answer.one(b"x-detail") == b"1"
    assert not site.fakes["long"].served


async def test_where_nobody_larger_is_well_the_refusal_passes_on(start: Start) -> None:
    site = await fleet(start)
    site.fakes["short"].always(scripts.error(400, WORDS[0]))
    site.fleet.failed(site.worker("long"), site.clock(), 60.0)
    answer = await site.ask(chat())
    assert (answer.status, answer.error()["message"]) == (400, WORDS[0])
    assert len(site.served()) == 1

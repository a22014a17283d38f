"""Streams of two real workers go on after their connection has failed."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from proxy.config import FleetConfig
from tests.fleet.relay import Relay, relaying
from tests.fleet.test_router import PORTS, Router, routing
from tests.fleet.test_worker import Workers, client_of, page

pytestmark = pytest.mark.engine("pushing")

OUTPUT_TOKENS = 160
DRAINED_TOKENS = 800  # a stream is held for 0.2 s before it moves, and must not end meanwhile
STREAMS, DRAINED_STREAMS = 12, 6


@contextmanager
def cutting(
    fleet: FleetConfig, folder: Path, *, journals: bool, **router_options: object
) -> Iterator[tuple[Router, list[Relay]]]:
    """Run a router whose connections to the workers can be cut."""
    with ExitStack() as stack:
        relays = [stack.enter_context(relaying(worker.url or "")) for worker in fleet.workers]
        workers: list[dict[str, object]] = [
            {"name": worker.name, "url": relay.url}
            | ({"journal": [*worker.journal]} if journals else {})
            for worker, relay in zip(fleet.workers, relays, strict=True)
        ]
        options = {**PORTS, "retries": {"budget": 1.0}, **router_options}
        yield stack.enter_context(routing(folder, workers, {}, router=options)), relays


@pytest.fixture(scope="module")
def cut_fleet(
    pushing: Workers, pushing_fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Router, list[Relay]]]:
    """Run a router that reads the journals of both workers."""
    assert pushing
    folder = tmp_path_factory.mktemp("cut")
    with cutting(pushing_fleet, folder, journals=True) as (router, relays):
        for worker in pushing_fleet.workers:
            router.wait_shown(f'proxy_journal_up{{worker="{worker.name}"}} 1')
        yield router, relays


async def streamed(
    client: AsyncOpenAI,
    chat: bool,
    fields: dict[str, Any],
    act: Callable[[], object],
    act_at: int | None,
) -> tuple[str, str | None, int]:
    """Return text, reason of the end and output tokens; act after that many pieces."""
    create: Any = client.chat.completions.create if chat else client.completions.create
    text, reason, tokens, pieces = "", None, 0, 0
    async for event in await create(
        model="tiny", temperature=0, stream=True, stream_options={"include_usage": True},
        **{"max_tokens": OUTPUT_TOKENS, **fields},
    ):  # fmt: skip
        if event.usage is not None:
            tokens = event.usage.completion_tokens
        for choice in event.choices:
            text += (choice.delta.content if chat else choice.text) or ""
            reason = choice.finish_reason or reason
            pieces += 1
        if pieces == act_at:
            await asyncio.to_thread(act)
            act_at = None
    return text, reason, tokens


async def streamed_message(
    client: AsyncAnthropic, fields: dict[str, Any], act: Callable[[], object], act_at: int | None
) -> tuple[list[tuple[int, str]], str, int]:
    """Return the same of a message: each block's index and text instead of the text."""
    blocks: list[tuple[int, str]] = []
    reason, tokens, pieces = "", 0, 0
    kinds = []
    async for event in await client.messages.create(
        model="tiny", max_tokens=OUTPUT_TOKENS, stream=True, extra_body={"temperature": 0}, **fields
    ):
        kinds.append(event.type)
        if event.type == "content_block_start":
            blocks.append((event.index, ""))
        elif event.type == "content_block_delta":
            index, text = blocks.pop()
            assert event.index == index
            assert event.delta.type == "text_delta"
            blocks.append((index, text + event.delta.text))
            pieces += 1
        elif event.type == "message_delta":
            reason, tokens = event.delta.stop_reason or "", event.usage.output_tokens
        if pieces == act_at:
            await asyncio.to_thread(act)
            act_at = None
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == ["message_start", "content_block_start"] + pieces * ["content_block_delta"] + (
        ends
    )
    return blocks, reason, tokens


def counted(router: Router, name: str) -> float:
    """Return the sum of a metric."""
    lines = page(router).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def requests(rng: random.Random, count: int) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield the fields of requests, and whether each is a chat."""
    for number in range(count):
        chat = number % 2 == 0
        words = " ".join(rng.choices(["one", "two", "three", "four"], k=rng.randrange(1, 300)))
        fields: dict[str, Any] = (
            {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
        )
        if number % 3 == 0:
            fields["extra_body"] = {"repetition_penalty": 1.2, "min_tokens": 40}
        yield chat, fields


async def test_cut_streams_equal_whole_ones(cut_fleet: tuple[Router, list[Relay]]) -> None:
    router, relays = cut_fleet
    rng = random.Random(11)

    def cut() -> None:
        max(relays, key=lambda relay: relay.data_at).cut()

    async with client_of(router) as client:
        for chat, fields in requests(rng, STREAMS):
            whole = await streamed(client, chat, fields, cut, None)
            cut_at = rng.randrange(2, OUTPUT_TOKENS // 2)
            assert await streamed(client, chat, fields, cut, cut_at) == whole
    # A stream may have arrived as a whole before its connection is cut.
    assert counted(router, "proxy_continued_streams_total") > STREAMS / 2


AGENTS = 6
FUNCTION = {"name": "get", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
TOOLS: list[Any] = [{"name": "get", "input_schema": {"type": "object", "properties": {}}}]


async def test_cut_streams_of_agents_equal_whole_ones(
    cut_fleet: tuple[Router, list[Relay]],
) -> None:
    """The model calls no tools, but the servers' parsers look for calls."""
    router, relays = cut_fleet
    rng = random.Random(13)
    before = counted(router, "proxy_continued_streams_total")

    def cut() -> None:
        max(relays, key=lambda relay: relay.data_at).cut()

    async with (
        client_of(router) as client,
        AsyncAnthropic(base_url=router.url, api_key="none", max_retries=0) as other,
    ):
        for number in range(AGENTS):
            words = " ".join(rng.choices(["one", "two", "three"], k=rng.randrange(1, 200)))
            messages = [{"role": "user", "content": words}]
            cut_at = rng.randrange(2, OUTPUT_TOKENS // 4)
            fields: dict[str, Any] = {"messages": messages}
            if number % 2:
                fields["tools"] = CHAT_TOOLS
                whole: Any = await streamed(client, True, fields, cut, None)
                assert await streamed(client, True, fields, cut, cut_at) == whole
            else:
                fields |= {"system": "short", "tools": TOOLS}
                whole = await streamed_message(other, fields, cut, None)
                assert await streamed_message(other, fields, cut, cut_at) == whole
    assert counted(router, "proxy_continued_streams_total") - before > AGENTS / 2


async def test_streams_of_drained_workers_equal_whole_ones(
    cut_fleet: tuple[Router, list[Relay]],
) -> None:
    router, _ = cut_fleet
    rng = random.Random(12)
    moved = []

    def drain() -> None:
        busy = [each["name"] for each in router.api("workers") if each["requests"]]
        for name in busy:
            drained = router.api(f"workers/{name}/drain?now=true", "POST")
            moved.append(drained["moved"])
            assert drained["remaining"] == {}
            router.api(f"workers/{name}/undrain", "POST")

    names = "proxy_streams_not_continued_total", "proxy_breaker_openings_total"
    before = [counted(router, name) for name in names]
    async with client_of(router) as client:
        for chat, fields in requests(rng, DRAINED_STREAMS):
            fields["max_tokens"] = DRAINED_TOKENS
            fields["extra_body"] = {**fields.get("extra_body", {}), "ignore_eos": True}
            whole = await streamed(client, chat, fields, drain, None)
            drain_at = rng.randrange(2, OUTPUT_TOKENS // 2)
            assert await streamed(client, chat, fields, drain, drain_at) == whole
    assert sum(moved) > DRAINED_STREAMS / 2
    assert [counted(router, name) for name in names] == before


WORDS = " one", " many", " in", " the", " of", " never", " answer", " running"
TEXT_STREAMS = 8


async def test_cut_streams_without_a_journal_go_on_from_their_text(
    pushing: Workers, pushing_fleet: FleetConfig, tmp_path: Path
) -> None:
    """The output consists of whole words, which are the same tokens in a prompt.

    A busy server puts several tokens into one event, which the router counts as one. The output is
    then longer by the others.
    """
    assert pushing
    rng = random.Random(14)
    with cutting(pushing_fleet, tmp_path, journals=False, continuation="text") as (router, relays):

        def cut() -> None:
            max(relays, key=lambda relay: relay.data_at).cut()

        async with client_of(router) as client:
            for chat, fields in requests(rng, TEXT_STREAMS):
                fields["logit_bias"] = dict.fromkeys(map(str, tokens_of(router, WORDS)), 100)
                text, *end = await streamed(client, chat, fields, cut, None)
                assert end == ["length", OUTPUT_TOKENS]
                cut_at = rng.randrange(2, OUTPUT_TOKENS // 2)
                cut_text, *cut_end = await streamed(client, chat, fields, cut, cut_at)
                assert cut_end == end
                assert cut_text.startswith(text)
                assert len(cut_text.split()) - len(text.split()) < OUTPUT_TOKENS / 4
        assert counted(router, "proxy_continued_streams_total") > TEXT_STREAMS / 2


def tokens_of(router: Router, words: Sequence[str]) -> list[int]:
    """Return the tokens of words that are one token each."""
    body = json.dumps({"model": "tiny", "prompt": "".join(words), "add_special_tokens": False})
    request = urllib.request.Request(
        f"{router.url}/tokenize", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    assert len(tokens) == len(words)
    return tokens

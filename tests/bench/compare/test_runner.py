"""The runner against a fake server with valid and broken vLLM streams."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from tests.bench.fake_openai import hosting
from vllm_sched.bench.compare.runner import play, request_body
from vllm_sched.bench.compare.workloads import PlannedRequest, Workload, agent_turns
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.workers.launch import WorkerError, free_port

TOKEN = b'data: {"id":"x","choices":[{"index":0,"text":"a"}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Start = Callable[[Handler], Awaitable[str]]


def usage(tokens: int) -> bytes:
    body = {"id": "x", "choices": [], "usage": {"completion_tokens": tokens}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(handler: Handler) -> str:
            app = web.Application()
            app.router.add_post("/v1/completions", handler)
            return await stack.enter_async_context(hosting(app))

        yield start


async def streamed(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(0)
    return response


async def serve_requested_tokens(request: web.Request) -> web.StreamResponse:
    wanted = (await request.json())["max_tokens"]
    return await streamed(request, *[TOKEN] * wanted, usage(wanted), DONE)


def workload(*arrivals: PlannedRequest) -> Workload:
    return Workload("test", arrivals, seed=1, lone_prompt_tokens=5)


SHORT = PlannedRequest(0.0, "short", 10, 3)


async def test_every_token_is_a_tick_and_the_count_is_checked(start: Start) -> None:
    seen: list[dict[str, Any]] = []
    at_once = highest = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal at_once, highest
        seen.append(await request.json())
        at_once += 1
        highest = max(highest, at_once)
        response = await serve_requested_tokens(request)
        at_once -= 1
        return response

    planned = workload(SHORT, PlannedRequest(0.02, "long", 50, 2))
    done: list[Outcome] = []
    played = await play(await start(handler), "m", planned, 4, on_done=done.append)
    assert [(r.klass, len(r.ticks), r.completed, r.error) for r in played.records] == [
        ("short", 3, 3, ""),
        ("long", 2, 2, ""),
    ]
    assert played.number == 4
    assert not played.failed
    assert len(done) == 2
    assert {tuple(body["prompt"]) for body in seen} == {tuple(p) for p in planned.prompts(4)}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in seen)
    for record in played.records:
        assert record.ticks == sorted(record.ticks)
        assert record.first_token is not None
        assert 0 <= record.sent <= record.first_token
    at_once = highest = 0
    played = await play(await start(handler), "m", workload(SHORT), 1, lone_samples=3)
    assert highest == 1  # lone requests run sequentially
    assert [(r.klass, r.completed) for r in played.lone] == [("lone", 1)] * 3


async def test_clock_starts_when_the_background_decodes(start: Start) -> None:
    release = asyncio.Event()
    order: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        background = body["max_tokens"] == 4
        order.append("background" if background else "short")
        if not background:
            release.set()
            return await streamed(request, *[TOKEN] * 3, usage(3), DONE)
        response = await streamed(request, TOKEN)
        await release.wait()  # a background request is still running when the short arrives
        await response.write(TOKEN * 3 + usage(4) + DONE)
        return response

    planned = workload(*[PlannedRequest(0.0, "background", 8, 4)] * 2, SHORT)
    played = await play(await start(handler), "m", planned, 1)
    assert order == ["background", "background", "short"]
    assert not played.failed
    for record in played.records[:2]:
        assert record.sent < record.ticks[0] <= 0 < record.ticks[-1]
    assert played.records[2].sent >= 0


async def test_cached_parts_of_prompts_are_computed_before_the_round(start: Start) -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await serve_requested_tokens(request)

    workload = agent_turns(longs=0, long_tokens=20, turns=2, new_tokens=5, background=1)
    done: list[Outcome] = []
    played = await play(await start(handler), "m", workload, 1, on_done=done.append)
    assert not played.failed
    assert len(done) == len(played.records)
    first, second, background, *turns = bodies
    assert [body["max_tokens"] for body in (first, second)] == [1, 1]
    assert background["max_tokens"] > 1
    assert [body["prompt"][:15] for body in turns] == [first["prompt"], second["prompt"]]
    assert {len(body["prompt"]) for body in turns} == {20}


async def test_client_stall_is_measured(start: Start) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # noqa: ASYNC251 - the fake server shares the client's loop
        return await serve_requested_tokens(request)

    played = await play(await start(handler), "m", workload(SHORT), 1)
    assert played.stall > 0.2


@pytest.mark.parametrize("allowed", [True, False])
async def test_client_has_real_time_priority_during_a_round_if_allowed(
    start: Start, monkeypatch: pytest.MonkeyPatch, *, allowed: bool
) -> None:
    policies: list[int] = []

    def setscheduler(_: int, policy: int, __: os.sched_param) -> None:
        policies.append(policy)
        if not allowed:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", setscheduler)
    played = await play(await start(serve_requested_tokens), "m", workload(SHORT), 1)
    assert not played.failed
    first = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    assert policies == ([first, os.SCHED_OTHER] if allowed else [first])


async def test_refusal_is_recorded_with_its_message(start: Start) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    planned = workload(PlannedRequest(0.0, "background", 8, 4), SHORT)
    # The refused background does not block the round.
    played = await play(await start(handler), "m", planned, 1)
    assert len(played.failed) == 2
    assert all("HTTP 400" in r.error and "prompt too long" in r.error for r in played.failed)
    assert not any(r.ticks for r in played.failed)
    planned = agent_turns(longs=0, long_tokens=20, turns=2, new_tokens=5, background=1)
    with pytest.raises(WorkerError, match=r"a prefix of 15 tokens .*prompt too long"):
        await play(await start(handler), "m", planned, 1)


SORRY = b'data: {"error":{"message":"engine died"}}\n\n'
SHORT_BY_ONE = "the stream ended after 2 of 3 tokens"


@pytest.mark.parametrize(
    ("chunks", "ticks", "error"),
    [
        ((TOKEN, SORRY, DONE), 1, "engine died"),
        ((TOKEN, TOKEN), 2, SHORT_BY_ONE),
        ((TOKEN, TOKEN, DONE), 2, SHORT_BY_ONE),
        ((TOKEN, TOKEN, usage(2), DONE), 2, SHORT_BY_ONE),
    ],
    ids=["an error event", "no end", "no usage", "too few"],
)
async def test_incomplete_stream_is_an_error(
    start: Start, chunks: tuple[bytes, ...], ticks: int, error: str
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await streamed(request, *chunks)

    played = await play(await start(handler), "m", workload(SHORT), 1)
    assert error in played.records[0].error
    assert len(played.records[0].ticks) == ticks


async def test_refused_connection_is_an_error() -> None:
    played = await play(f"http://127.0.0.1:{free_port()}", "m", workload(SHORT), 1, lone_samples=1)
    assert len(played.failed) == 2


def test_request_body_has_the_prompt_tokens_and_lane() -> None:
    body = json.loads(request_body("m", [11, 12], 16))
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ([11, 12], 16, True)
    assert "vllm_xargs" not in body
    with_lane = json.loads(request_body("m", [11, 12], 16, "batch"))
    assert with_lane == {**body, "vllm_xargs": {"lane": "batch"}}

"""Streams with reasoning and tool calls that go on from another worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.core.request.continuable import DIFFERS
from tests.proxy.http import agent_streams
from tests.proxy.http.agent_streams import Token
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.test_continuation import Engines, in_turn, journaled
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import chat, request

TOKENS: list[Token] = [
    ("reasoning", "Hm"), ("reasoning", ' "ö'), ("content", "I"), ("content", " look."),
    ("name", "get"), ("arguments", '{"a": "'), ("arguments", '\\n😀"'), ("arguments", "}"),
    ("name", "put"), ("arguments", "{}"),
]  # fmt: skip
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": {"name": "get", "parameters": {}}}],
    "messages": [{"name": "get", "input_schema": {"type": "object"}}],
}
ROUTES = pytest.mark.parametrize("route", ["chat", "messages"])


class Agents(Engines):
    """Workers that reason, write and call tools."""

    def serve(self, *, dies_after: int | None = None, end: str = "reset", ahead: int = 0) -> Script:
        async def run(call: Call) -> None:
            body = call.json()
            self.asked.append(body)
            request_id = call.all(b"x-request-id")[0].decode()
            so_far = len(body.get("vllm_xargs", {}).get("output_so_far", ()))
            name = f"w{len(self.asked)}"
            if self.route == "chat":
                steps = agent_streams.chat_events(TOKENS, so_far + 1, name)
            else:
                steps = agent_streams.message_steps(TOKENS, so_far + 1, name)
            await call.send(scripts.STREAM_HEAD + scripts.chunk(steps.pop(0)))
            for own in range(len(TOKENS) - so_far):
                if own == dies_after:
                    shown = min(so_far + own + ahead, len(TOKENS) - 1)
                    self.published[request_id] = [*range(shown)]
                    await scripts.finish(call, end)
                    return
                self.published[request_id] = [*range(so_far + own + 1)]
                await call.send(scripts.chunk(steps.pop(0)))
            await call.send(b"".join(map(scripts.chunk, steps)) + scripts.LAST_CHUNK)

        return run


def asked(route: str, **fields: Any) -> bytes:
    tools = TOOLS[route]
    if route == "chat":
        return chat(stream=True, tools=tools, **fields)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 50, "stream": True}
    body = {**body, "system": "s", "tools": tools, **fields}
    return request(json.dumps(body).encode(), path="/v1/messages")


def read(route: str, stream: bytes) -> tuple[list[list[str]], dict[str, Any]]:
    of_route: Callable[..., Any] = (
        agent_streams.read_chat if route == "chat" else agent_streams.read_message
    )
    found: tuple[list[list[str]], dict[str, Any]] = of_route(stream)
    return found


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("dies_after", range(len(TOKENS)))
@ROUTES
async def test_client_sees_one_stream(
    start: Start, route: str, dies_after: int, ahead: int
) -> None:
    site, engines = await journaled(start, Agents(route=route))
    in_turn(site, engines.serve(dies_after=dies_after, ahead=ahead), engines.serve())
    answer = await (await site.send(asked(route))).answer()
    output, got = read(route, answer.body)
    assert output == agent_streams.whole(TOKENS)
    calls = [each for each in got["ids"] if each.startswith("call")]
    names = [n for n, (kind, _) in enumerate(TOKENS) if kind == "name"]
    assert calls == [
        f"call-w{1 if number < dies_after else 2}-{place + 1}" for place, number in enumerate(names)
    ]
    assert got["roles"] == got["done"] == 1
    assert got["finish"] == ["tool_calls" if route == "chat" else "tool_use"]
    assert len(got["usage"]) == 1
    assert sum(site.metrics.continuations.values()) == 1
    await site.settled()


@ROUTES
async def test_a_stream_outlives_two_workers(start: Start, route: str) -> None:
    site, engines = await journaled(start, Agents(route=route), workers=3)
    in_turn(
        site,
        engines.serve(dies_after=3),
        engines.serve(dies_after=4, end="close"),
        engines.serve(),
    )
    answer = await (await site.send(asked(route))).answer()
    assert read(route, answer.body)[0] == agent_streams.whole(TOKENS)
    assert [len(b.get("vllm_xargs", {}).get("output_so_far", ())) for b in engines.asked] == [
        0, 3, 7,
    ]  # fmt: skip
    await site.settled()


CHAT_FAILED = scripts.event({"error": {"message": "EngineCore encountered an issue"}})
MESSAGE_FAILED = b"event: error\n" + scripts.event({"type": "error", "error": {"message": "no"}})
MESSAGE_ABORTED = b'event: message_delta\ndata: {"type":"message_delta","delta":' + (
    b'{"stop_reason":null,"stop_sequence":null},"usage":{"input_tokens":1,"output_tokens":2}}\n\n'
)


def failing(route: str, steps: int, *failure: bytes) -> Script:
    """Send the first steps of a stream, then the report of a failure."""
    steps_of = agent_streams.chat_events if route == "chat" else agent_streams.message_steps
    pieces = [*steps_of(TOKENS)[:steps], *failure]
    return scripts.raw(scripts.STREAM_HEAD, *map(scripts.chunk, pieces), gap_s=0.01)


@pytest.mark.parametrize(
    ("route", "failure"),
    [("chat", CHAT_FAILED), ("messages", MESSAGE_FAILED), ("messages", MESSAGE_ABORTED)],
    ids=["chat", "error", "aborted"],
)
@pytest.mark.parametrize("tokens", [0, 1, 6])
async def test_an_engine_that_fails_under_a_living_server(
    start: Start, route: str, failure: bytes, tokens: int
) -> None:
    site, engines = await journaled(start, Agents(route=route))
    in_turn(site, failing(route, tokens + 1, failure), engines.serve())
    site.fleet.roster.stream_tokens = lambda *_: [*range(tokens)]
    answer = await (await site.send(asked(route))).answer()
    assert read(route, answer.body)[0] == agent_streams.whole(TOKENS)
    await site.settled()


@pytest.mark.parametrize(
    ("route", "failure"), [("chat", CHAT_FAILED), ("messages", MESSAGE_ABORTED)]
)
@pytest.mark.parametrize("at", [3, 12, 60])
async def test_a_report_of_a_failure_arrives_in_two_pieces(
    start: Start, route: str, failure: bytes, at: int
) -> None:
    site, engines = await journaled(start, Agents(route=route))
    in_turn(site, failing(route, 4, failure[:at], failure[at:]), engines.serve())
    site.fleet.roster.stream_tokens = lambda *_: [*range(3)]
    answer = await (await site.send(asked(route))).answer()
    assert read(route, answer.body)[0] == agent_streams.whole(TOKENS)
    assert sum(site.metrics.continuations.values()) == 1
    await site.settled()


async def test_text_that_looks_like_a_failure_is_none(start: Start) -> None:
    site, engines = await journaled(start, Agents(route="chat"))
    events = agent_streams.chat_events([("content", "a"), ("content", "event: error"), TOKENS[2]])
    at = events[2].index(b"event: error")
    pieces = [*events[:2], events[2][:at], events[2][at:], b"".join(events[3:])]
    script = scripts.raw(
        scripts.STREAM_HEAD, *map(scripts.chunk, pieces), scripts.LAST_CHUNK, gap_s=0.01
    )
    in_turn(site, script, engines.serve())
    site.fleet.roster.stream_tokens = lambda *_: [0]
    answer = await (await site.send(asked("chat"))).answer()
    assert read("chat", answer.body)[0] == [["content", "aevent: errorI"]]
    assert sum(site.metrics.continuations.values()) == 0
    await site.settled()


@ROUTES
async def test_another_output_ends_with_an_error(start: Start, route: str) -> None:
    site, engines = await journaled(start, Agents(route=route))
    steps = agent_streams.chat_events if route == "chat" else agent_streams.message_steps
    other = steps([*TOKENS[:4], ("name", "unasked"), *TOKENS[5:]], 8)
    in_turn(
        site,
        engines.serve(dies_after=7),
        scripts.raw(scripts.STREAM_HEAD, *map(scripts.chunk, other)),
    )
    client = await site.send(asked(route))
    answer = await client.answer()
    last = answer.body.split(b"\n\n")[-2]
    assert b'"error"' in last
    assert last.startswith(b"event: error" if route == "messages" else b"data: ")
    assert b"unasked" not in answer.body
    assert site.metrics.lost_streams == {DIFFERS: 1}
    await site.settled()


GRAMMARS: dict[str, tuple[str, dict[str, Any]]] = {
    "tool_choice": ("chat", {"tool_choice": "required"}),
    "single": ("chat", {"parallel_tool_calls": False}),
    "json": ("chat", {"response_format": {"type": "json_object"}}),
    "any": ("messages", {"tool_choice": {"type": "any"}}),
    "format": ("messages", {"output_config": {"format": {"type": "json_schema"}}}),
}


@pytest.mark.parametrize("name", GRAMMARS)
async def test_requests_with_a_grammar_are_continued(start: Start, name: str) -> None:
    route, fields = GRAMMARS[name]
    site, engines = await journaled(start, Agents(route=route))
    in_turn(site, engines.serve(dies_after=3), engines.serve())
    answer = await (await site.send(asked(route, **fields))).answer()
    assert read(route, answer.body)[0] == agent_streams.whole(TOKENS)
    assert engines.asked[1] == {**engines.asked[0], "vllm_xargs": {"output_so_far": [0, 1, 2]}}
    await site.settled()

"""Workers with journals that generate the same output, and a router before them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import orjson

from proxy.core.fleet.worker import Worker
from tests.proxy.http import agent_streams
from tests.proxy.http.agent_streams import Token
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import Answer, Client, chat, request
from tests.proxy.wire.site import Fake, Site

# Escapes, several bytes a character, repetitions.
WORDS = ["Hel", "lo", ' "w', "\\", "ö", "rld", "\n\n", "a", "a", "a", "😀", " data: [DONE]", "end"]
ROLE = {"role": "assistant", "content": ""}
TOKENS: list[Token] = [
    ("reasoning", "Hm"), ("reasoning", ' "ö'), ("content", "I"), ("content", " look."),
    ("name", "get"), ("arguments", '{"a": "'), ("arguments", '\\n😀"'), ("arguments", "}"),
    ("name", "put"), ("arguments", "{}"),
]  # fmt: skip
TWO = Fake("w0"), Fake("w1")
THREE = *TWO, Fake("w2")


class Engines:
    """Workers that generate the same text."""

    def __init__(self, words: Sequence[str] = WORDS, *, route: str = "chat") -> None:
        self.words = list(words)
        self.route = route
        self.published: dict[str, list[int]] = {}  # by X-Request-Id; a token is its word's number
        self.asked: list[dict[str, Any]] = []

    def serve(
        self,
        *,
        dies_after: int | None = None,
        end: str = "reset",
        ahead: int = 0,
        pause: asyncio.Event | None = None,
        pause_after: int = 1,
    ) -> Script:
        """Return a script; the worker dies after that many tokens of its own.

        `ahead`: further tokens that the engine published and the client did not get. `pause`: the
        tokens after `pause_after` own ones come after this event.
        """

        async def run(call: Call) -> None:
            request_id, so_far = self.accept(call)
            opening, *steps = self.steps(so_far)
            await call.send(scripts.STREAM_HEAD + (scripts.chunk(opening) if opening else b""))
            count = self.count()
            for own, number in enumerate(range(len(so_far), count + 1)):
                if own == dies_after:
                    known = max(number, min(number + ahead, count - 1))
                    self.published[request_id] = [*range(known)]
                    await scripts.finish(call, end)
                    return
                if number == count:
                    break
                if own == pause_after and pause is not None:
                    await pause.wait()
                self.published[request_id] = [*range(number + 1)]
                await call.send(scripts.chunk(steps.pop(0)))
            await call.send(b"".join(map(scripts.chunk, steps)) + scripts.LAST_CHUNK)

        return run

    def fail(self, tokens: int, *failure: bytes) -> Script:
        """Return a script of a server that reports after some tokens that its engine failed.

        `failure`: the pieces of the report.
        """

        async def run(call: Call) -> None:
            request_id, _ = self.accept(call)
            self.published[request_id] = [*range(tokens)]
            events = filter(None, self.steps([])[: tokens + 1])
            await call.send(scripts.STREAM_HEAD + b"".join(map(scripts.chunk, events)))
            for piece in (*failure, scripts.DONE):
                await asyncio.sleep(0.02)  # so that each is a piece of its own
                await call.send(scripts.chunk(piece))
            await call.send(scripts.LAST_CHUNK)

        return run

    def accept(self, call: Call) -> tuple[str, list[int]]:
        """Record a call; return its ID and the tokens that the client has."""
        body = call.json()
        self.asked.append(body)
        so_far = body.get("vllm_xargs", {}).get("output_so_far", ())
        return call.all(b"x-request-id")[0].decode(), list(so_far)

    def count(self) -> int:
        return len(self.words)

    def steps(self, so_far: list[int]) -> list[bytes]:
        """Return the opening of a stream, an event for each further token, and the last events."""
        last, repeated = self.count() - 1, "".join(self.words[number] for number in so_far)
        events = [self.event(ROLE) if self.route == "chat" else b""]
        for number in range(len(so_far), self.count()):
            text, repeated = repeated + self.words[number], ""
            events.append(self.event(self.piece(text), last=number == last))
        return [*events, scripts.usage_event(7, self.count()), scripts.DONE]

    def piece(self, text: str) -> dict[str, str]:
        return {"content": text} if self.route == "chat" else {"text": text}

    def event(self, piece: dict[str, str], *, last: bool = False) -> bytes:
        body = {"delta": piece} if self.route == "chat" else piece
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": "stop" if last else None}
        whole = {"id": "c", "object": "chunk", "created": 1, "model": "tiny", "choices": [choice]}
        return b"data: %b\n\n" % orjson.dumps(whole)

    def tokens(self, worker: Worker, request_id: str, since: float) -> list[int] | None:
        assert worker.can_continue
        assert since > 0
        return self.published.get(request_id)

    def request(self, *headers: bytes, **fields: Any) -> bytes:
        """Return a request for the stream."""
        if self.route == "chat":
            return chat("hi", *headers, stream=True, **fields)
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 50, "stream": True, **fields}
        return request(json.dumps(body).encode(), *headers, path="/v1/completions")

    def check(self, answer: Answer, deaths: Sequence[int] = ()) -> None:  # noqa: ARG002
        """Check that a client has the whole output and each other part of the stream once.

        `deaths`: the numbers of tokens that the client had when a worker died.
        """
        assert answer.status == 200
        *events, done = [each.removeprefix(b"data: ") for each in answer.body.split(b"\n\n")[:-1]]
        assert done == b"[DONE]", done
        parsed = [json.loads(event) for event in events]
        choices = [choice for event in parsed for choice in event["choices"]]
        texts = [each.get("text") or each.get("delta", {}).get("content", "") for each in choices]
        assert "".join(texts) == "".join(self.words)
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
        roles = sum("role" in choice.get("delta", {}) for choice in choices)
        assert roles == (self.route == "chat")
        assert parsed[-1]["usage"] == scripts.usage(7, self.count())
        assert len({event["id"] for event in parsed}) == 1


class Agents(Engines):
    """Workers that reason, write and call tools."""

    def count(self) -> int:
        return len(TOKENS)

    def steps(self, so_far: list[int]) -> list[bytes]:
        steps = agent_streams.chat_events if self.route == "chat" else agent_streams.message_steps
        return steps(TOKENS, len(so_far) + 1, f"w{len(self.asked)}")

    def request(self, *headers: bytes, **fields: Any) -> bytes:
        tools: dict[str, Any] = {"name": "get", "input_schema": {"type": "object"}}
        if self.route == "chat":
            tools = {"type": "function", "function": {"name": "get", "parameters": {}}}
            return chat("hi", *headers, stream=True, tools=[tools], **fields)
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 50, "stream": True}
        body |= {"system": "s", "tools": [tools], **fields}
        return request(json.dumps(body).encode(), *headers, path="/v1/messages")

    def check(self, answer: Answer, deaths: Sequence[int] = ()) -> None:
        read = agent_streams.read_chat if self.route == "chat" else agent_streams.read_message
        output, got = read(answer.body)
        assert output == agent_streams.whole(TOKENS)
        names = [number for number, (kind, _) in enumerate(TOKENS) if kind == "name"]
        workers = [1 + sum(death <= number for death in deaths) for number in names]
        calls = [f"call-w{worker}-{place}" for place, worker in enumerate(workers, start=1)]
        assert [each for each in got["ids"] if each.startswith("call")] == calls
        assert got["roles"] == got["done"] == 1
        assert got["finish"] == ["tool_calls" if self.route == "chat" else "tool_use"]
        assert len(got["usage"]) == 1


class TextEngines(Engines):
    """Workers without journals that go on behind a given text."""

    behind = ""

    def accept(self, call: Call) -> tuple[str, list[int]]:
        request_id, _ = super().accept(call)
        body = self.asked[-1]
        if self.route == "chat":
            message = body["messages"][-1]
            goes_on = message["role"] == "assistant"
            assert body.get("continue_final_message", False) == goes_on
            assert body.get("add_generation_prompt", True) != goes_on
            self.behind = message["content"] if goes_on else ""
        else:
            self.behind = body["prompt"].removeprefix("hi")
        ends = itertools.accumulate(map(len, self.words))
        return request_id, [*range(sum(end <= len(self.behind) for end in ends))]

    def steps(self, so_far: list[int]) -> list[bytes]:
        first, last = len(so_far), self.count() - 1
        known = len(self.behind) - len("".join(self.words[:first]))
        words = [self.words[first][known:], *self.words[first + 1 :]]
        events = [self.event(ROLE) if self.route == "chat" else b""]
        for number, word in enumerate(words, first):
            events.append(self.event(self.piece(word), last=number == last))
        return [*events, scripts.usage_event(7 + first, len(words)), scripts.DONE]


async def journaled(
    start: Start, *fakes: Fake, engines: Engines | None = None, **options: Any
) -> tuple[Site, Engines]:
    """Start a router before workers with journals."""
    site, engines = await start(*(fakes or TWO), **options), engines or Engines()
    site.fleet.roster.stream_tokens = engines.tokens
    for name in site.fakes:
        site.worker(name).reports_prefixes = True
    return site, engines


def in_turn(site: Site, *turns: Script) -> None:
    """Answer the calls to all workers with these scripts, in order."""
    left = list(turns)

    async def serve(call: Call) -> None:
        await left.pop(0)(call)

    site.always(serve)


async def check_broken(client: Client, text: bytes = b"") -> list[bytes]:
    """Check that a stream ends with an error event; return the events before it."""
    *events, last = (await client.answer()).body.split(b"\n\n")[:-1]
    assert b'"error"' in last
    assert text in last
    return events

"""Usage of a hand-over in the format of each API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.config import TransferConfig
from proxy.transfer.registry import connector
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.kv import CHAT, COHERE, COMPLETIONS, MESSAGES, OPENINGS, RESPONSES
from tests.proxy.wire.pairs import ask, pairs
from tests.proxy.wire.raw_client import Answer
from tests.proxy.wire.scripts import LAST_CHUNK, SSE, chunk, event, head

TOTAL, WRITTEN = 1600, 4
Usages = Callable[[int], dict[str, Any]]


def openai(cached: int) -> dict[str, Any]:
    """Return usage as in chats and completions."""
    return scripts.usage(TOTAL, WRITTEN) | {"prompt_tokens_details": {"cached_tokens": cached}}


def responses(cached: int) -> dict[str, Any]:
    """Return usage as in /v1/responses."""
    details = {"cached_tokens": cached, "cached_tokens_per_turn": [], "input_tokens_per_turn": []}
    return {"input_tokens": TOTAL, "input_tokens_details": details, "output_tokens": WRITTEN}


def anthropic(cached: int) -> dict[str, Any]:
    """Return usage as in /v1/messages, where input tokens exclude cached ones."""
    return {
        "input_tokens": TOTAL - cached, "output_tokens": WRITTEN, "cache_read_input_tokens": cached,
    }  # fmt: skip


def cohere(cached: int) -> dict[str, Any]:
    """Return usage as in Cohere's chats, in floats."""
    tokens = {"input_tokens": float(TOTAL), "output_tokens": float(WRITTEN)}
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": float(cached)}


USAGES: dict[str, Usages] = {
    CHAT: openai, COMPLETIONS: openai, RESPONSES: responses, MESSAGES: anthropic, COHERE: cohere,
}  # fmt: skip
DELTAS = {
    CHAT: b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    COMPLETIONS: b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
    RESPONSES: b"event: response.output_text.delta\n" + event({"delta": "a"}),
    MESSAGES: b"event: content_block_delta\n" + event({"type": "content_block_delta"}),
    COHERE: b'data: {"index":0,"type":"content-delta"}\n\n',
}


def last_event(path: str, usage: dict[str, Any]) -> bytes:
    """Return the event of a stream with usage."""
    if path == RESPONSES:
        return b"event: response.completed\n" + event({"response": {"usage": usage}})
    if path == MESSAGES:
        return b"event: message_delta\n" + event({"type": "message_delta", "usage": usage})
    if path == COHERE:
        return b'data: {"delta":{"usage":%b},"type":"message-end"}\n\n' % json.dumps(usage).encode()
    return event({"choices": [], "usage": usage})


def answer_with_usage(path: str, cached: int) -> Script:
    """Answer with a usage that has this number of cached tokens."""
    usage = USAGES[path](cached)

    async def run(call: Call) -> None:
        if not call.json().get("stream"):
            body = {"id": "c", "usage": usage, "x": 1.5}
            await scripts.answer(body=json.dumps(body, separators=(",", ":")).encode())(call)
            return
        await call.send(head(200, (b"content-type", SSE), (b"transfer-encoding", b"chunked")))
        for piece in (OPENINGS.get(path, b""), DELTAS[path], last_event(path, usage)):
            if piece:
                await call.send(chunk(piece))
        await call.send(LAST_CHUNK)

    return run


def usage_in(answer: Answer, *, stream: bool) -> dict[str, Any]:
    """Return the usage of a response."""
    if not stream:
        assert answer.json()["x"] == 1.5
        return dict(answer.json()["usage"])
    last = json.loads(answer.body.rstrip().rpartition(b"data: ")[2])
    inner = last.get("response") or last.get("delta") or last
    return dict(inner["usage"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prefill_cached", [0, 9, 128, 1599])
@pytest.mark.parametrize("path", USAGES)
async def test_cached_tokens_are_those_of_the_prefill_worker(
    start: Start, path: str, prefill_cached: int, stream: bool
) -> None:
    here = await pairs(start, prefills=1, decodes=1)
    here.site.wire.connector = connector(TransferConfig(connector="shared-storage"))
    for name, cached in (("p0", prefill_cached), ("d0", 1536)):
        here.site.fakes[name].always(answer_with_usage(path, cached))
    prompt = "z" * 300
    fields = {"input": prompt} if path == RESPONSES else {"prompt": prompt}
    if path in (CHAT, MESSAGES, COHERE):
        fields = {"messages": [{"role": "user", "content": prompt}]}  # type: ignore[dict-item]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {"model": "tiny", "stream": stream, limit: WRITTEN, **fields}
    answer = await ask(here, json.dumps(body).encode(), path=path)
    assert answer.status == 200
    assert usage_in(answer, stream=stream) == USAGES[path](prefill_cached)
    assert [call.json().get("stream") for call in here.site.served()] == [False, stream]
    await here.site.settled()

"""Scripts for the fake worker, from usual responses to broken ones."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.proxy.wire.fake_worker import Call, Script

LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
METRICS = (
    b"# TYPE vllm:num_requests_running gauge\n"
    b'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0\n'
    b"# TYPE vllm:num_requests_waiting gauge\n"
    b'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0\n'
    b"# TYPE vllm:kv_cache_usage_perc gauge\n"
    b'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0\n'
)
SSE = b"text/event-stream; charset=utf-8"


def head(status: int, *headers: tuple[bytes, bytes]) -> bytes:
    """Return the head of a response; the caller adds the framing headers."""
    lines = [b"HTTP/1.1 %d Whatever" % status, *(b"%s: %s" % pair for pair in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


STREAM_HEAD = head(200, (b"content-type", SSE), (b"transfer-encoding", b"chunked"))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def token(text: str) -> bytes:
    """Return an event with text of a chat's response."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny",
                  "choices": [choice]})  # fmt: skip


def usage_event(prompt: int, completion: int) -> bytes:
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny",
                  "choices": [], "usage": usage(prompt, completion)})  # fmt: skip


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def answer(
    status: int = 200,
    body: bytes = b"{}",
    *headers: tuple[bytes, bytes],
    content_type: bytes = b"application/json",
    framing: str = "length",
) -> Script:
    """Answer with a whole body, framed by length, one chunk or closing."""

    async def run(call: Call) -> None:
        lead = [(b"content-type", content_type), *headers]
        if framing == "chunked":
            await call.send(head(status, *lead, (b"transfer-encoding", b"chunked")))
            await call.send((chunk(body) if body else b"") + LAST_CHUNK)
        elif framing == "close":
            await call.send(head(status, *lead, (b"connection", b"close")) + body)
            call.close()
        else:
            lead.append((b"content-length", b"%d" % len(body)))
            await call.send(head(status, *lead) + (b"" if call.method == b"HEAD" else body))

    return run


def error(status: int, message: str = "no", *headers: tuple[bytes, bytes]) -> Script:
    """Answer with an error in vLLM's words."""
    body = {"error": {"message": message, "type": "x", "param": None, "code": status}}
    return answer(status, json.dumps(body).encode(), *headers)


def raw(*pieces: bytes, gap_s: float = 0.0, end: str = "keep") -> Script:
    """Send bytes as they are; then keep the connection, `close` it, `reset` it or `stall`."""

    async def run(call: Call) -> None:
        for number, piece in enumerate(pieces):
            if number and gap_s:
                await asyncio.sleep(gap_s)
            await call.send(piece)
        await finish(call, end)

    return run


async def finish(call: Call, end: str) -> None:
    """End a response in one of four ways."""
    if end == "close":
        call.close()
    elif end == "reset":
        await asyncio.sleep(0.02)  # a reset would overtake the data
        call.reset()
    elif end == "stall":
        await call.lost.wait()


async def stall(call: Call) -> None:
    await call.lost.wait()


async def reset(call: Call) -> None:
    call.reset()


async def hang_up(call: Call) -> None:
    call.close()


def stream(
    count: int,
    *,
    gap_s: float = 0.0,
    end: str = "done",
    text: str = "tok ",
    with_usage: bool = False,
) -> Script:
    """Stream tokens; then end as a worker does, or `close`, `reset` or `stall`."""

    async def run(call: Call) -> None:
        await call.send(head(200, (b"content-type", SSE), (b"transfer-encoding", b"chunked")))
        for number in range(count):
            if gap_s:
                await asyncio.sleep(gap_s)
            await call.send(chunk(token(text + str(number))))
        if end != "done":
            await finish(call, end)
            return
        tail = chunk(usage_event(count_of(call), count)) if with_usage else b""
        await call.send(tail + chunk(DONE) + LAST_CHUNK)

    return run


def gated(opening: asyncio.Event, script: Script) -> Script:
    """Run a script once an event is set."""

    async def run(call: Call) -> None:
        gate, lost = (asyncio.ensure_future(event.wait()) for event in (opening, call.lost))
        try:
            await asyncio.wait((gate, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.cancel()
            lost.cancel()
        if not call.lost.is_set():
            await script(call)

    return run


def models(name: str, max_model_len: int) -> Script:
    """Answer as vLLM's /v1/models does."""
    card = {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": name,
            "parent": None, "max_model_len": max_model_len, "permission": []}  # fmt: skip
    return answer(body=json.dumps({"object": "list", "data": [card]}).encode())


def count_of(call: Call) -> int:
    """Return a token per four bytes of the body."""
    return len(call.body) // 4


async def tokenize(call: Call) -> None:
    """Answer as vLLM's /tokenize does."""
    body = {"count": count_of(call), "max_model_len": 16384, "tokens": [], "token_strs": None}
    await answer(body=json.dumps(body).encode())(call)


def obey(name: str) -> Script:
    """Serve a request as asked: with a stream of three tokens, or with a whole response."""

    async def run(call: Call) -> None:
        try:
            body = json.loads(call.body)
        except ValueError:
            body = None
        if isinstance(body, dict) and body.get("stream") is True:
            await stream(3, with_usage=True)(call)
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": name},
                  "finish_reason": "stop"}  # fmt: skip
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "tiny",
                "choices": [choice], "usage": usage(count_of(call), 1)}  # fmt: skip
        await answer(200, json.dumps(body).encode(), (b"x-worker", name.encode()))(call)

    return run

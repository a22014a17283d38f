"""Mock workers that use little CPU, so that the router in front of them is measured.

    python -m benchmarks.router.mock 9001 9002 --prefill 9003 --decode 9004

A connection takes one request at a time, with a Content-Length. A body of at most `READ_BYTES` with
`"stream":true` gets `max_tokens` events at the interval in its text (`gap-25ms`: routers may drop
fields, but not text). Larger bodies are not parsed.

Prefill and decode workers hand over as with NIXL: a prefill response has parameters, which the
decode worker accepts once. Other legs get 409 if their body is parsed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import re
import signal
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

import uvloop

MODEL = "mock"
MAX_MODEL_LEN = 1_048_576
READ_BYTES = 8192

EVENT = (
    b'data: {"id":"chatcmpl-8f3c61d2a7","object":"chat.completion.chunk","created":1780000000,'
    b'"model":"mock","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END_OF_HEAD = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
# One of the routers measured here renames the field.
MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
GAP = re.compile(rb"gap-(\d+)ms")
STREAM = re.compile(rb'"stream":\s*true')
COMPLETIONS = (b"POST /v1/chat/completions", b"POST /v1/completions")
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 16
PREFILL_LEG = re.compile(rb'"do_remote_decode":\s*true')
ONE_TOKEN = re.compile(rb'"max_(?:completion_)?tokens":\s*1\b')
DECODE_LEG = re.compile(rb'"do_remote_prefill":\s*true.*"remote_request_id":\s*"([^"]+)"')
REQUEST_NUMBER = b"0123456789"  # placeholder in prefill responses
CONFLICT = 409


def chunk(payload: bytes) -> bytes:
    """Frame one piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


EVENT_CHUNK = chunk(EVENT)
LAST_CHUNKS = chunk(DONE) + b"0\r\n\r\n"


def answer(body: bytes, status: int = 200, kind: bytes = b"application/json") -> bytes:
    """Frame a whole answer."""
    phrase = HTTPStatus(status).phrase.encode()
    head = b"HTTP/1.1 %d %b\r\nserver: uvicorn\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, phrase, kind, len(body)) + body


@functools.lru_cache(maxsize=4096)
def completion(body_bytes: int, *, prefill: bool = False) -> bytes:
    """Return the response to a completion; its usage depends on the request's size."""
    prompt = body_bytes // BYTES_PER_TOKEN
    parameters = {"kv_transfer_params": transfer(prompt)} if prefill else {}
    message = {"role": "assistant", "content": "Sixteen tokens of the very same answer. " * 2}
    return answer(
        json.dumps(
            {
                "id": "chatcmpl-8f3c61d2a7",
                "object": "chat.completion",
                "created": 1780000000,
                "model": MODEL,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": 16,
                    "total_tokens": prompt + 16,
                },
            }
            | parameters
        ).encode()
    )


def transfer(prompt_tokens: int) -> dict[str, object]:
    """Return a NIXL worker's transfer parameters for a prompt."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[*range(1000, 1000 + prompt_tokens // BLOCK_TOKENS)]],
        "remote_engine_id": "5a0c3c0e-3f5e-4f0b-9d8c-6d1f5b5e7a11",
        "remote_request_id": REQUEST_NUMBER.decode(),
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": prompt_tokens,
        "transfer_mode": "pull",
    }


@functools.cache
def gauges() -> bytes:
    """Return metrics of a real worker's length; routers read only the first lines."""
    label = f'{{engine="0",model_name="{MODEL}"}}'
    lines = [
        f"vllm:num_requests_running{label} 4.0",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:kv_cache_usage_perc{label} 0.05",
        f"vllm:prompt_tokens_total{label} 1.0e+06",
        f"vllm:generation_tokens_total{label} 1.0e+06",
        f"vllm:num_preemptions_total{label} 0.0",
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1048576"} 1.0',
    ]
    for number in range(24):
        name = f"vllm:made_up_{number}_seconds"
        lines += [f"# HELP {name} A histogram.", f"# TYPE {name} histogram"]
        lines += [
            f'{name}_bucket{{engine="0",le="{2**power / 1000}",model_name="{MODEL}"}} 1000.0'
            for power in range(20)
        ]
        lines += [f"{name}_sum{label} 100.0", f"{name}_count{label} 1000.0"]
    return answer("\n".join([*lines, ""]).encode(), kind=b"text/plain; version=0.0.4")


def fixed(start: bytes) -> bytes:
    """Return the response to a request that is not a completion, by its request line."""
    if start.startswith(b"GET /health "):
        return answer(b"")
    if start.startswith(b"GET /metrics "):
        return gauges()
    if start.startswith(b"GET /v1/models "):
        served = {"id": MODEL, "object": "model", "max_model_len": MAX_MODEL_LEN}
        return answer(json.dumps({"object": "list", "data": [served]}).encode())
    if start.startswith(b"POST /tokenize "):
        return answer(b'{"count":256,"max_model_len":%d,"tokens":[]}' % MAX_MODEL_LEN)
    return answer(b'{"error":{"message":"no such path","code":404}}', 404)


class Worker(asyncio.Protocol):
    """One connection from a router."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._held = b""  # the beginning of a request
        self._unread = 0  # remaining bytes of a large body
        self._reply = b""  # sent after the large body
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._gap_s = 0.0
        self._events_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's derives from nothing

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        if self._unread:
            if len(data) < self._unread:
                self._unread -= len(data)
                return
            data, self._unread = data[self._unread :], 0
            self._transport.write(self._reply)
        elif self._held:
            data = self._held + data
        while (begin := data.find(END_OF_HEAD)) >= 0:
            begin += len(END_OF_HEAD)
            length = int(match[1]) if (match := LENGTH.search(data, 0, begin)) else 0
            if length > READ_BYTES:
                self._reply = self._reply_to(data[:64], length)
                data, self._unread = self._skip_body(data, begin + length)
            elif len(data) < begin + length:
                break
            else:
                self._serve(data[:64], data[begin : begin + length])
                data = data[begin + length :]
        self._held = data

    def _skip_body(self, data: bytes, end: int) -> tuple[bytes, int]:
        """Skip a large request; return the data after it and the number of missing bytes."""
        if len(data) < end:
            return b"", end - len(data)
        self._transport.write(self._reply)
        return data[end:], 0

    def _reply_to(self, start: bytes, body_bytes: int) -> bytes:
        return completion(body_bytes) if start.startswith(COMPLETIONS) else fixed(start)

    def _serve(self, start: bytes, body: bytes) -> None:
        if start.startswith(COMPLETIONS) and STREAM.search(body):
            tokens, gap = MAX_TOKENS.search(body), GAP.search(body)
            self._events_left = int(tokens[1]) if tokens else 16
            self._gap_s = int(gap[1]) / 1000 if gap else 0.0
            self._due = asyncio.get_running_loop().time()
            self._transport.write(STREAM_HEAD)
            self._send_event()
        else:
            self._transport.write(self._reply_to(start, len(body)))

    def _send_event(self) -> None:
        """Send one event and schedule the next by the clock, so that delays do not add up."""
        self._timer = None
        self._events_left -= 1
        if self._events_left <= 0:
            self._transport.write(EVENT_CHUNK + LAST_CHUNKS)
            return
        self._transport.write(EVENT_CHUNK)
        self._due += self._gap_s
        self._timer = asyncio.get_running_loop().call_at(self._due, self._send_event)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        """Stop streaming."""
        if self._timer is not None:
            self._timer.cancel()


class Prefill(Worker):
    """One connection to a prefill worker."""

    numbers = itertools.count(1)
    open_transfers: set[bytes] = set()  # noqa: RUF012 - of all connections of this process

    def _reply_to(self, start: bytes, body_bytes: int) -> bytes:
        if not start.startswith(COMPLETIONS):
            return fixed(start)
        number = b"%010d" % next(self.numbers)
        if body_bytes <= READ_BYTES:
            self.open_transfers.add(number)
        return completion(body_bytes, prefill=True).replace(REQUEST_NUMBER, number)

    def _serve(self, start: bytes, body: bytes) -> None:
        leg = PREFILL_LEG.search(body) and ONE_TOKEN.search(body) and not STREAM.search(body)
        if start.startswith(COMPLETIONS) and not leg:
            self._transport.write(answer(b'{"error":"no prefill"}', CONFLICT))
        else:
            super()._serve(start, body)


class Decode(Worker):
    """One connection to a decode worker."""

    def _serve(self, start: bytes, body: bytes) -> None:
        if start.startswith(COMPLETIONS):
            leg = DECODE_LEG.search(body)
            if leg is None or leg[1] not in Prefill.open_transfers:
                self._transport.write(answer(b'{"error":"no decode"}', CONFLICT))
                return
            Prefill.open_transfers.discard(leg[1])
        super()._serve(start, body)


async def serve(ports: dict[type[Worker], Sequence[int]]) -> None:
    """Serve each kind of worker on its ports until SIGINT or SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    servers = [
        await loop.create_server(kind, "127.0.0.1", port, backlog=4096)
        for kind, kind_ports in ports.items()
        for port in kind_ports
    ]
    await stop.wait()
    for server in servers:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="mock vLLM workers")
    parser.add_argument("ports", type=int, nargs="*")
    parser.add_argument("--prefill", type=int, nargs="+", default=[])
    parser.add_argument("--decode", type=int, nargs="+", default=[])
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve({Worker: args.ports, Prefill: args.prefill, Decode: args.decode}))


if __name__ == "__main__":
    main()

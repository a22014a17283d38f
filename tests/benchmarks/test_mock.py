"""The mock worker's endpoints."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.router import mock
from tests.benchmarks.servers import mock_worker


async def send(*pieces: bytes, answers: int = 1, kind: type[mock.Worker] = mock.Worker) -> bytes:
    """Send pieces separately; return the bytes of `answers` complete answers."""
    async with mock_worker(kind) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)  # so that the pieces are read separately
        found = b""
        async with asyncio.timeout(60):
            for _ in range(answers):
                head = await reader.readuntil(mock.END_OF_HEAD)
                length = mock.LENGTH.search(head)
                found += head
                found += (
                    await reader.readexactly(int(length[1]))
                    if length
                    else await reader.readuntil(b"0\r\n\r\n")
                )
        writer.close()
        await writer.wait_closed()
        return found


def post(path: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


def body_of(raw: bytes) -> bytes:
    return raw.partition(mock.END_OF_HEAD)[2]


async def test_requests_in_any_pieces_get_the_same_answer() -> None:
    small, large = (post("/v1/completions", b"x" * size) for size in (4000, 40_000))
    for request in (small, large):
        alone = await send(request)
        assert alone.startswith(b"HTTP/1.1 200 OK\r\n")
        for cut in (5, request.index(b"\r\n\r\n") + 2, request.index(b"xx"), len(request) - 1):
            assert await send(request[:cut], request[cut:]) == alone
    first, second = await send(large), await send(small)
    assert json.loads(body_of(second))["usage"]["prompt_tokens"] == 1000
    assert await send(small + large, answers=2) == second + first
    assert await send(large + small, answers=2) == first + second
    assert await send(large[:-9], large[-9:] + small, answers=2) == first + second


async def test_other_endpoints_answer() -> None:
    assert (await send(b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
    models = json.loads(body_of(await send(b"GET /v1/models HTTP/1.1\r\n\r\n")))
    assert models["data"][0]["id"] == mock.MODEL
    assert models["data"][0]["max_model_len"] == mock.MAX_MODEL_LEN
    metrics = body_of(await send(b"GET /metrics HTTP/1.1\r\n\r\n"))
    assert b"\nvllm:num_requests_waiting{" in metrics
    assert len(metrics) > 30_000  # as long as a real page
    assert json.loads(body_of(await send(post("/tokenize", b"{}"))))["count"] == 256
    assert (await send(b"GET /other HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 Not Found\r\n")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_stream_has_max_tokens_events(field: str) -> None:
    fields = {"stream": True, field: 7, "user": "gap-1ms"}
    for text in (json.dumps(fields), json.dumps(fields, separators=(",", ":"))):
        raw = await send(post("/v1/chat/completions", text.encode()))
        assert raw.count(mock.EVENT_CHUNK) == 7
        assert raw.endswith(mock.EVENT_CHUNK + mock.LAST_CHUNKS)


async def test_abandoned_stream_ends() -> None:
    worker = mock.Worker()
    sent: list[bytes] = []

    class Recorder(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            sent.append(bytes(data))

    worker.connection_made(Recorder())
    worker.data_received(
        post("/v1/completions", b'{"stream":true,"max_tokens":9,"user":"gap-1ms"}')
    )
    assert len(sent) == 2  # the head and the first event
    worker.connection_lost(None)
    await asyncio.sleep(0.02)
    assert len(sent) == 2


PREFILL_LEG = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}


async def test_blocks_can_be_fetched_once() -> None:
    leg = json.dumps(PREFILL_LEG | {"prompt": "x" * 400}).encode()
    answer = json.loads(body_of(await send(post("/v1/completions", leg), kind=mock.Prefill)))
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert len(params["remote_block_ids"][0]) == params["remote_num_tokens"] // mock.BLOCK_TOKENS
    decode = post("/v1/completions", json.dumps({"kv_transfer_params": params}).encode())
    assert (await send(decode, kind=mock.Decode)).startswith(b"HTTP/1.1 200")
    assert (await send(decode, kind=mock.Decode)).startswith(b"HTTP/1.1 409")
    # A large leg is answered without parsing.
    large = post("/v1/completions", b"x" * 100_000)
    again = json.loads(body_of(await send(large, kind=mock.Prefill)))["kv_transfer_params"]
    assert again["remote_request_id"] != params["remote_request_id"]
    assert again["remote_num_tokens"] == 25_000


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 1},
        PREFILL_LEG | {"max_tokens": 16},
        PREFILL_LEG | {"stream": True},
        PREFILL_LEG | {"kv_transfer_params": {"do_remote_decode": False}},
    ],
)
async def test_invalid_prefill_leg_gets_409(body: object) -> None:
    for kind in (mock.Prefill, mock.Decode):
        found = await send(post("/v1/completions", json.dumps(body).encode()), kind=kind)
        assert found.startswith(b"HTTP/1.1 409")
        assert (await send(b"GET /health HTTP/1.1\r\n\r\n", kind=kind)).startswith(b"HTTP/1.1 200")

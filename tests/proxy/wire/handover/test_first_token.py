"""The opening of a stream, before its first token, in a hand-over."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.wire.handover import first_token
from proxy.wire.handover.two_legs import TwoLegExchange
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import CHAT, DELTAS, OPENINGS, RESPONSES, Faults
from tests.proxy.wire.pairs import Pairs, ask, pairs
from tests.proxy.wire.scripts import LAST_CHUNK, SSE, chunk
from tests.proxy.wire.site import eventually

STREAM = scripts.head(200, (b"content-type", SSE), (b"transfer-encoding", b"chunked"))
ERROR = b'event: error\ndata: {"type":"error","error":{"message":"no blocks"}}\n\n'
ERRORS = {path: ERROR.partition(b"\n")[2] if path == CHAT else ERROR for path in OPENINGS} | {
    "/cohere/v2/chat": b'data: {"type":"message-end","delta":{"error":"no blocks"}}\n\n'
}
FIELDS = {
    "/v1/responses": {"input": "z" * 300, "max_output_tokens": 4},
} | {path: {"messages": [{"role": "user", "content": "z" * 300}], "max_tokens": 4}
     for path in (CHAT, "/v1/messages", "/cohere/v2/chat")}  # fmt: skip
DELTA = b'event: content_block_delta\ndata: {"delta":"x"}\n\n'


def body_of(path: str) -> bytes:
    return json.dumps({"model": "tiny", "stream": True, **FIELDS[path]}).encode()


@pytest.mark.parametrize("path", OPENINGS)
def test_opening_or_part_of_it_is_no_result(path: str) -> None:
    whole = OPENINGS[path]
    assert all(first_token.find_result(whole[:end]) == -1 for end in range(1, len(whole) + 1))
    assert first_token.find_result(whole.replace(b"\n", b"\r\n")) == -1
    for result in (ERRORS[path], DELTA, b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'):
        assert first_token.find_result(whole + result) == len(whole)
    assert first_token.begins_with_error(whole + ERRORS[path])
    assert not first_token.begins_with_error(whole + DELTA)
    assert not first_token.begins_with_error(whole)


@pytest.mark.parametrize("text", [b"{", b'{"error": 1}', b"<html>"])
def test_other_bodies_than_streams_are_a_result(text: bytes) -> None:
    assert first_token.find_result(text) == 0
    assert not first_token.begins_with_error(text)


@pytest.mark.parametrize("path", OPENINGS)
@pytest.mark.parametrize("end", ["error", "error alone", "reset", "close"])
async def test_failure_after_the_opening_is_retried(start: Start, path: str, end: str) -> None:
    here = await pairs(start, prefills=1)
    pieces = [] if end == "error alone" else [chunk(OPENINGS[path])]
    if fails := end.startswith("error"):
        pieces += [chunk(ERRORS[path]), LAST_CHUNK]
    failing = scripts.raw(STREAM, *pieces, gap_s=0.02, end="keep" if fails else end)
    here.kv.inject("decode", Faults(during=failing))
    answer = await ask(here, body_of(path), path=path)
    assert answer.status == 200
    assert b"no blocks" not in answer.body
    assert answer.body.endswith(scripts.DONE)
    assert answer.body.count(OPENINGS[path]) == (path in DELTAS)
    await here.settled()
    kinds = here.kinds()
    assert kinds[:2] == ["prefill", "decode"]
    assert len(kinds) > 2
    ends = here.site.metrics.handovers.ends
    assert ends["decode_failed"] == 1
    assert ends.get("transferred", 0) == kinds.count("decode") - 1


@pytest.mark.parametrize("path", OPENINGS)
async def test_opening_does_not_stop_the_lease_timeout(start: Start, path: str) -> None:
    here = await pairs(start, prefills=1)

    async def hang(call: Call) -> None:
        await call.send(STREAM + chunk(OPENINGS[path]))
        await scripts.stall(call)

    here.kv.inject("decode", Faults(during=hang))
    client = await here.send(body_of(path), path=path)
    await eventually(lambda: any(handover._opening for handover in handovers(here)))
    here.site.skip(26.5)  # the blocks are kept for 30 s
    assert (await client.answer()).body.endswith(scripts.DONE)
    await here.settled()
    assert here.site.metrics.handovers.ends["late_failed"] == 1


def handovers(here: Pairs) -> list[TwoLegExchange]:
    attempts = [exchange._attempt for exchange in here.site.wire.exchanges]
    return [a.handover for a in attempts if a is not None and a.handover is not None]


@pytest.mark.parametrize("path", OPENINGS)
async def test_opening_passes_with_the_first_token(here: Pairs, path: str) -> None:
    rest = asyncio.Event()
    start_of, kind = DELTAS.get(path, (b"", ""))
    delta = start_of + scripts.event({"type": kind, "delta": "x"}) if kind else scripts.token("x")

    async def send_slowly(call: Call) -> None:
        await call.send(STREAM + chunk(OPENINGS[path]))
        await call.send(chunk(delta))
        await rest.wait()
        await call.send(LAST_CHUNK)

    here.kv.inject("d0", Faults(during=send_slowly))
    client = await here.send(body_of(path), path=path)
    head = await client.head()
    rest.set()
    assert await client.body(head) == OPENINGS[path] + delta
    await here.settled()
    assert here.site.metrics.handovers.ends["transferred"] == 1


async def test_opening_above_a_megabyte_passes_before_the_first_token(here: Pairs) -> None:
    rest, instructions = asyncio.Event(), b'{"instructions":"%b"}' % (b"x" * 1_500_000)
    opening = OPENINGS[RESPONSES].replace(b"{}", instructions, 1)

    async def send_slowly(call: Call) -> None:
        await call.send(STREAM + chunk(opening))
        await rest.wait()
        await call.send(chunk(DELTA) + LAST_CHUNK)

    here.kv.inject("d0", Faults(during=send_slowly))
    client = await here.send(body_of(RESPONSES), path=RESPONSES)
    head = await client.head()
    rest.set()
    assert await client.body(head) == opening + DELTA

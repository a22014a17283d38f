"""Invalid content in valid HTTP and JSON responses: the client gets an end."""

from __future__ import annotations

import json

import pytest

from proxy.core.model.role import Role
from proxy.wire.exchange import attempt
from proxy.wire.exchange.response_writer import ResponseWriter
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start, start
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import ask, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake

__all__ = ["start"]
DEEP = b'{"a":' * 600 + b"1" + b"}" * 600
# Responses of a prefill worker in place of its transfer parameters.
PREFILL_RESPONSES = {
    "deep parameters": b'{"kv_transfer_params": {"do_remote_prefill": true, '
    b'"remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", '
    b'"remote_port": 1, "tp_size": 1, "remote_block_ids": [[1]], "x": %b}}' % DEEP,
    "deep usage": b'{"usage": %b}' % DEEP,
    "a list": b"[]",
    "nothing": b"",
    "text": b"\xff\xfe",
    "no parameters": b'{"kv_transfer_params": null}',
    "parameters of another kind": b'{"kv_transfer_params": [1, 2]}',
    "odd parameters": json.dumps(
        {"kv_transfer_params": {"do_remote_prefill": 1, "remote_host": [], "remote_port": {},
                                "tp_size": "x", "remote_engine_id": None}}
    ).encode(),
    "odd usage": b'{"usage": {"prompt_tokens": -5, '
    b'"prompt_tokens_details": {"cached_tokens": -1}}}',
    "huge usage": b'{"usage": {"prompt_tokens": 1e300, "completion_tokens": 18446744073709551615}}',
    "negative blocks": b'{"kv_transfer_params": {"remote_num_tokens": -1, '
    b'"remote_block_ids": [[-1]]}}',
}  # fmt: skip


@pytest.mark.parametrize("name", PREFILL_RESPONSES)
async def test_invalid_prefill_response_ends_the_request(start: Start, name: str) -> None:
    fleet = await pairs(start, wire={"first_byte_s": 2.0, "idle_s": 2.0})
    strange = Faults(during=scripts.answer(200, PREFILL_RESPONSES[name]))
    fleet.kv.inject("prefill", strange, strange, strange)
    body = chat_body()
    answer = await ask(fleet, body)
    if answer.status == 200:
        assert words(answer) == expected(body)
    else:
        answer.error()
    await fleet.site.settled()
    fleet.kv.faults.clear()  # the fake's own, about blocks that it never had


@pytest.mark.parametrize(
    "response",
    [b"", b"[]", b'{"count": -1}', b'{"count": 1e99}', b'{"count": "x"}', b'{"count": %s}' % DEEP,
     b'{"count": 18446744073709551615}', b"{" * 2000, b"x" * 2_000_000],
)  # fmt: skip
async def test_invalid_token_count_ends_the_request(start: Start, response: bytes) -> None:
    roles = Fake("s", Role.SHORT), Fake("l", Role.LONG)
    site = await start(*roles, router={"short_limit": 60}, wire={"count_s": 5.0})
    for fake in site.fakes.values():
        fake.always(scripts.answer(200, response), "/tokenize")
    answer = await site.ask(chat("x" * 120, max_tokens=20))
    assert answer.status in (200, 400)
    counts = [c for fake in site.fakes.values() for c in fake.calls if c.path == "/tokenize"]
    assert len(counts) == 1
    await site.settled()


# A whole answer is read at once, a stream in pieces.
@pytest.mark.plain("replaces a part")
@pytest.mark.parametrize(
    ("place", "stream"), [((attempt, "pass_at_once"), False), ((ResponseWriter, "feed"), True)]
)
async def test_router_exception_is_502(
    start: Start, monkeypatch: pytest.MonkeyPatch, place: tuple[object, str], stream: bool
) -> None:
    """The client gets an error, and nothing stays charged."""
    site = await start()

    def broken(*_: object, **__: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(*place, broken)
    answer = await site.ask(chat(stream=stream))
    assert answer.status == 502
    answer.error()
    await site.settled()
    monkeypatch.undo()
    assert (await site.ask(chat())).status == 200

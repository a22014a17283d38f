"""Headers that pass, are removed, or are added."""

from __future__ import annotations

import pytest

from proxy.core.model.role import Role
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat, get, request
from tests.proxy.wire.site import Fake, Site

BODY = b'{"model": "tiny", "messages": []}'


async def test_request_headers_reach_the_worker_unchanged(site: Site) -> None:
    lines = (
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        b"tracestate: a=1,b=2",
        b"baggage: k=v",
        b"User-Agent: OpenAI/Python 3",
        b"X-Stainless-Lang: python",
        b"Accept: text/event-stream",
        b"OpenAI-Organization: org",
        b"X-Latin: caf\xe9",
        b"X-Empty:",
        b"X-Twice: 1",
        b"X-Twice: 2",
        b"Cookie: a=b; c=d",
        b"x-data-parallel-rank: 1",
        b"X-Request-Id: mine",
        b"Authorization: Bearer theirs",
    )
    answer = await site.ask(request(BODY, *lines))
    assert (answer.status, answer.one(b"x-request-id")) == (200, b"mine")
    [call] = site.fake.served
    for line in lines:
        name, _, value = line.partition(b":")
        assert value.strip() in call.all(name), name
    assert call.all(b"x-twice") == [b"1", b"2"]
    assert call.all(b"x-request-id") == [b"mine"]
    assert call.all(b"content-type") == [b"application/json"]
    assert call.all(b"content-length") == [b"%d" % len(BODY)]
    assert call.all(b"host") == [b"127.0.0.1:%d" % site.fake.port]


async def test_connection_header_cannot_remove_the_routers_headers(site: Site) -> None:
    """A header that `Connection` names is removed, unless the router itself writes it."""
    lines = (
        b"Connection: close, Content-Length, Host, Content-Type, X-Request-Id",
        b"X-Request-Id: a",
    )
    assert (await site.ask(request(BODY, *lines))).status == 200
    [call] = site.fake.served
    assert call.body == BODY
    assert len(call.all(b"host")) == 1
    assert call.all(b"x-request-id") != []


async def test_router_responses_carry_a_request_id(site: Site) -> None:
    for data in (get("/health"), get("/nowhere"), request(b"{"), request(b'{"model": "x"}')):
        named = data.replace(b"\r\n\r\n", b"\r\nX-Request-Id: mine\r\n\r\n", 1)
        assert (await site.ask(named)).all(b"x-request-id") == [b"mine"]
        assert len((await site.ask(data)).one(b"x-request-id")) > 8


async def test_worker_api_key_replaces_client_authorization(start: Start) -> None:
    site = await start(
        Fake("w0", api_key="secret0", max_model_len=4096), Fake("w1", max_model_len=4096),
        router={"policy": "round_robin"},
    )  # fmt: skip
    for _ in range(4):
        answer = await site.ask(request(BODY, b"Authorization: Bearer theirs", b"X-Explain: 1"))
        assert b"secret0" not in answer.body + repr(answer.headers).encode()
    for call in site.fakes["w0"].served:
        assert call.all(b"authorization") == [b"Bearer secret0"]
    for call in site.fakes["w1"].served:
        assert call.all(b"authorization") == [b"Bearer theirs"]
    assert len(site.fakes["w0"].served) == len(site.fakes["w1"].served) == 2


async def test_x_explain_adds_the_route_header(start: Start) -> None:
    site = await start(Fake("s0", role=Role.SHORT), Fake("l0", role=Role.LONG))
    assert (await site.ask(chat())).all(b"x-route") == []
    for data in (chat("hi", b"X-Explain: 1"), chat("hi", b"x-explain: true", stream=True)):
        answer = await site.ask(data)
        route = answer.one(b"x-route").decode()
        worker, reason, *scores = route.split("; ")
        assert worker in ("s0", "l0")
        assert reason.partition("=")[0] == "reason"
        assert reason.partition("=")[2] in {"short_pool", "spill_to_long", "prefix"}
        assert {score.partition("=")[0] for score in scores} == {"s0", "l0"}
    assert not any(call.all(b"x-explain") for f in site.fakes.values() for call in f.served)


@pytest.mark.parametrize("value", [b"0", b"false", b"No", b"off", b""])
async def test_negative_x_explain_adds_no_route_header(site: Site, value: bytes) -> None:
    assert (await site.ask(chat("hi", b"X-Explain: " + value))).all(b"x-route") == []


GET = b"GET /v1/models HTTP/1.1\r\n"
REFUSED_HEADS = {
    "no host": (GET + b"X-Request-Id: mine\r\n\r\n", 400, b"mine"),
    "two hosts": (GET + b"Host: a\r\nHost: b\r\nX-Request-Id: mine\r\n\r\n", 400, b"mine"),
    "an expectation": (GET + b"Host: a\r\nExpect: b\r\nX-Request-Id: mine\r\n\r\n", 417, b"mine"),
    "too large a body": (
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n"
        b"X-Request-Id: mine\r\n\r\n", 413, b"mine",
    ),
    "an id that is none": (GET + b"X-Request-Id: %b\r\n\r\n" % (b"x" * 300), 400, None),
    "nothing said of it": (GET + b"\r\n", 400, None),
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_HEADS)
async def test_request_refused_for_its_head_has_a_request_id(site: Site, name: str) -> None:
    """The ID finds the request in the log."""
    data, status, expected = REFUSED_HEADS[name]
    client = await site.send(data)
    answer = await client.answer()
    assert answer.status == status
    request_id = answer.one(b"x-request-id")
    assert request_id == expected if expected else 10 < len(request_id) < 100
    if status == 413:  # in the format of the API
        assert answer.json()["error"]["type"] == "request_too_large"


async def test_request_id_is_not_reused_for_the_next_request(site: Site) -> None:
    client = await site.client()
    assert (await client.ask(chat("hi", b"X-Request-Id: first"))).status == 200
    await client.send(b"nonsense\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.one(b"x-request-id") == b"first") == (400, False)


async def test_encoded_body_is_415(site: Site) -> None:
    answer = await site.ask(request(b"\x1f\x8b\x08", b"Content-Encoding: gzip"))
    assert answer.status == 415
    assert "Content-Encoding: gzip is not supported" in answer.error()["message"]
    assert (await site.ask(request(BODY, b"Content-Encoding: Identity"))).status == 200

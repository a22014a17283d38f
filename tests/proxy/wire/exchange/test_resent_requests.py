"""Requests resent to another worker after a failure before the response began."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.core.model.role import Role
from proxy.net.resolver import NoAddressAnswersError
from proxy.wire.exchange.worker_errors import MAX_ERROR_BYTES
from proxy.wire.worker.connection import is_local_failure
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.engines import in_turn
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.pairs import chat_body, pairs
from tests.proxy.wire.raw_client import chat, get, request
from tests.proxy.wire.site import Fake, Site, eventually

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
FAILURES: dict[str, Script] = {
    "reset": scripts.reset,
    "close": scripts.hang_up,
    "half a head": scripts.raw(HEAD, end="reset"),
    "a head alone": scripts.raw(HEAD + b"Content-Length: 9\r\n\r\n", end="reset"),
    "a head alone, closed": scripts.raw(HEAD + b"Content-Length: 9\r\n\r\n", end="close"),
    "a stream's head alone": scripts.stream(0, end="reset"),
    "500": scripts.error(500),
    "503": scripts.error(503),
    "599": scripts.error(599),
    "429": scripts.error(429),
    "500 with a large body": scripts.answer(500, b"x" * (1 << 20)),
    "500 in chunks": scripts.answer(500, b"no", framing="chunked"),
    "500 that never ends": scripts.raw(
        b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\nno", end="stall"
    ),
    "stall": scripts.stall,
    "stall after the head": scripts.stream(0, end="stall"),
}


def first_fails(script: Script) -> Script:
    """Fail the first call with a script, and serve all later calls."""
    calls: list[Call] = []

    async def run(call: Call) -> None:
        calls.append(call)
        if len(calls) == 1:
            await script(call)
        else:
            await scripts.obey(call.connection.worker.name)(call)

    return run


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAILURES)
async def test_failed_request_is_resent_unchanged_to_another_worker(
    start: Start, name: str, stream: bool
) -> None:
    site = await start(Fake("w0"), Fake("w1"), wire={"first_byte_s": 0.3, "idle_s": 0.3})
    site.always(first_fails(FAILURES[name]))
    data = chat("hello \u00e9", b"X-Other: kept", b"traceparent: 00-a-b-01", stream=stream)
    answer = await site.ask(data)
    assert answer.status == 200
    if stream:
        assert answer.body.endswith(scripts.DONE)
        assert answer.body.count(b"data: ") == 5
    first, second = site.served()
    assert first.connection.worker is not second.connection.worker
    assert first.body == second.body == data.partition(b"\r\n\r\n")[2]

    def headers_without_host(call: Call) -> list[tuple[bytes, bytes]]:
        return [pair for pair in call.headers if pair[0] != b"host"]

    assert headers_without_host(first) == headers_without_host(second)


async def test_reset_during_the_request_body_is_retried_elsewhere(start: Start) -> None:
    """The worker reads part of the body and resets."""
    site = await start(Fake("w0"), Fake("w1"))
    for name, fake in site.fakes.items():
        fake.cut_after = 100_000
        site.worker(name).max_model_len = None
    site.fakes["w0"].cuts_left = 1
    body = b'{"model": "tiny", "prompt": "%s", "max_tokens": 1}' % (b"x" * 3_000_000)
    for _ in range(2):
        assert (await site.ask(request(body, path="/v1/completions"))).status == 200
    assert site.fakes["w0"].cuts_left == 0


async def test_worker_that_accepts_no_connection_is_replaced(start: Start) -> None:
    router, wire = {"policy": "round_robin"}, {"connect_s": 0.2}
    site = await start(Fake("w0"), Fake("w1"), router=router, wire=wire)
    await site.fakes["w0"].hang()
    for _ in range(4):
        assert (await site.ask(chat())).status == 200
    assert len(site.fakes["w1"].served) == 4


@pytest.mark.parametrize(
    ("status", "workers"),
    [(400, 1), (404, 1), (499, 1), (501, 1), (505, 1), (429, 2), (500, 2), (503, 2), (504, 2)],
)
async def test_last_error_response_passes_unchanged(
    start: Start, status: int, workers: int
) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    for name, fake in site.fakes.items():
        fake.always(scripts.error(status, f"{name} has failed", (b"x-detail", name.encode())))
    answer = await site.ask(chat())
    assert answer.status == status
    last = site.served()[-1].connection.worker.name
    assert answer.json()["error"]["message"] == f"{last} has failed"
    assert answer.one(b"x-detail") == last.encode()
    assert len(site.served()) == workers


@pytest.mark.parametrize(
    ("script", "status"),
    [(scripts.reset, 502), (scripts.raw(b"SSH-2.0-x\r\n", end="stall"), 502), (scripts.stall, 504)],
    ids=["reset", "no HTTP", "stall"],
)
async def test_no_response_from_any_worker_gets_502_or_504(
    start: Start, script: Script, status: int
) -> None:
    site = await start(Fake("w0"), Fake("w1"), wire={"first_byte_s": 0.2})
    site.always(script)
    client = await site.client()
    answer = await client.ask(chat())
    assert answer.status == status
    assert answer.error()["type"] == "server_error"
    assert len(site.served()) == 2
    site.always(scripts.obey("well"))
    assert (await client.ask(chat())).status == 200  # the client's connection is kept


@pytest.mark.parametrize(("attempts", "budget", "failing"), [(1, 0.0, []), (2, 1.0, ["w4"])])
async def test_workers_that_refuse_connections_use_up_no_attempts(
    start: Start, attempts: int, budget: float, failing: list[str]
) -> None:
    """Half a fleet is gone, and its workers look idle."""
    router = {"policy": "round_robin", "max_attempts": attempts, "retry_budget": budget}
    site = await start(*(Fake(f"w{n}") for n in range(6)), router=router)
    for name in ("w0", "w1", "w2", "w3"):
        await site.fakes[name].refuse()
    for name in failing:
        site.fakes[name].always(scripts.error(500))
    for _ in range(12):
        assert (await site.ask(chat())).status == 200


def responses_event(name: str) -> bytes:
    """Return an event of a stream of `/v1/responses`, with the response's id."""
    return b'event: response.%s\ndata: {"response": {"id": "resp_1"}}\n\n' % name.encode()


EVENTS = [*map(responses_event, ("created", "in_progress", "output_text.delta", "completed"))]
OPENING, OUTPUT = [*map(scripts.chunk, EVENTS[:2])], [*map(scripts.chunk, EVENTS[2:])]
WHOLE_STREAM = (scripts.STREAM_HEAD, *OPENING, *OUTPUT, scripts.LAST_CHUNK)
WHOLE_BODY = b"".join(EVENTS)


def ask_responses(text: str = "hi", **fields: Any) -> bytes:
    body = {"model": "tiny", "input": text, "stream": True, **fields}
    return request(json.dumps(body).encode(), path="/v1/responses")


@pytest.mark.parametrize("end", ["reset", "close", "stall"])
async def test_stream_of_a_worker_that_fails_before_its_output_is_retried(
    start: Start, end: str
) -> None:
    """The opening events come before the prefill, in which a worker may fail."""
    site = await start(Fake("w0"), Fake("w1"), wire={"first_byte_s": 0.3, "idle_s": 9.0})
    in_turn(site, scripts.raw(scripts.STREAM_HEAD, *OPENING, end=end), scripts.raw(*WHOLE_STREAM))
    answer = await site.ask(ask_responses())
    assert (answer.status, answer.body) == (200, WHOLE_BODY)
    assert len(site.served()) == 2


async def test_silence_before_the_output_may_last_as_before_the_response(start: Start) -> None:
    site = await start(wire={"first_byte_s": 9.0, "idle_s": 0.1})
    gate = asyncio.Event()

    async def wait(call: Call) -> None:
        await scripts.raw(scripts.STREAM_HEAD, *OPENING)(call)
        await gate.wait()
        await scripts.raw(*OUTPUT, scripts.LAST_CHUNK)(call)

    site.fake.always(wait)
    client = await site.send(ask_responses())
    await site.fake.got()
    await site.pass_time(0.3)
    gate.set()
    assert (await client.answer()).body == WHOLE_BODY


async def test_opening_of_a_background_response_passes_at_once(site: Site) -> None:
    """Its client may cancel the response by its id."""
    site.fake.always(scripts.raw(scripts.STREAM_HEAD, *OPENING, end="stall"))
    client = await site.send(ask_responses(background=True))
    assert (await client.head()).status == 200
    assert (await client.piece()).startswith(EVENTS[0])


DEADLY = "this request ends its worker"


def deadly(end: Script) -> Script:
    """End requests that contain `DEADLY` with a script, and serve all others."""

    async def run(call: Call) -> None:
        await (end if DEADLY.encode() in call.body else scripts.obey("well"))(call)

    return run


def workers_hit(site: Site) -> list[str]:
    """Return the names of the workers that a deadly request was sent to."""
    return [call.connection.worker.name for call in site.served() if DEADLY.encode() in call.body]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("warm", [True, False], ids=["reused", "fresh"])
@pytest.mark.parametrize("name", ["reset", "close", "half a head", "a stream's head alone"])
async def test_request_dropped_by_two_workers_is_not_retried(
    start: Start, name: str, warm: bool, stream: bool
) -> None:
    """The request may cause the drops. Neither worker gets it twice on a new connection."""
    site = await start(*(Fake(f"w{n}") for n in range(5)), router={"max_attempts": 5})
    site.always(deadly(FAILURES[name]))
    client = await site.client()
    while warm and not all(fake.open for fake in site.fakes.values()):
        await asyncio.gather(*(site.ask(chat()) for _ in range(10)))
    answer = await client.ask(chat(DEADLY, stream=stream))
    assert len(workers_hit(site)) == len(set(workers_hit(site))) == 2
    assert (answer.status, answer.error()["code"]) == (502, "request_dropped")
    assert "Two workers" in answer.error()["message"]
    assert answer.one(b"x-should-retry") == b"false"
    assert answer.all(b"retry-after") == []
    assert (await client.ask(chat())).status == 200


@pytest.mark.parametrize("spares", ["takes no connection", "is busy"])
async def test_busy_or_unreachable_worker_is_no_drop(start: Start, spares: str) -> None:
    fakes = [Fake(f"w{n}") for n in range(4)]
    site = await start(*fakes, router={"policy": "round_robin", "max_attempts": 4})
    for name in ("w0", "w2"):
        if spares == "is busy":
            site.fakes[name].always(deadly(scripts.error(503)))
        else:
            await site.fakes[name].refuse()
    site.fakes["w1"].always(deadly(scripts.reset))
    assert (await site.ask(chat(DEADLY))).status == 200
    assert workers_hit(site)[-1] == "w3"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("warm", [True, False], ids=["reused", "fresh"])
@pytest.mark.parametrize("end", [scripts.reset, scripts.hang_up])
async def test_leg_dropped_by_two_workers_is_not_retried(
    start: Start, end: Script, warm: bool, role: Role
) -> None:
    here = await pairs(start, prefills=4, decodes=4, max_attempts=5)
    while warm and not all(fake.open for fake in here.site.fakes.values()):
        await asyncio.gather(*(here.site.ask(request(chat_body())) for _ in range(16)))
    for fake in here.site.fakes.values():
        usual = here.kv.worker(fake, here.site.worker(fake.name).role.value)

        async def run(call: Call, usual: Script = usual, name: str = fake.name) -> None:
            ends = DEADLY.encode() in call.body and name.startswith(role.value[0])
            await (end if ends else usual)(call)

        fake.always(run)
    body = chat_body(user=DEADLY)
    answer = await here.site.ask(request(body))
    assert (answer.status, answer.error()["code"]) == (502, "request_dropped")
    hit = [name for name in workers_hit(here.site) if name.startswith(role.value[0])]
    assert len(hit) == len(set(hit)) == 2


async def test_spent_retry_budget_gets_502_with_retry_after(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.reset)
    budget, later = site.router._retries, site.clock() + 600.0
    while budget.spend(later):
        pass
    answer = await site.ask(chat())
    assert (answer.status, answer.one(b"retry-after")) == (502, b"1")
    assert "too many" in answer.error()["message"]


# Failures of the router itself


@contextlib.contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Prevent this process from opening files and sockets."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)  # the lowest free number
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("handover", [False, True])
async def test_lack_of_descriptors_opens_no_breaker(
    start: Start, caplog: pytest.LogCaptureFixture, handover: bool
) -> None:
    fakes = [Fake("p0", Role.PREFILL), Fake("d0", Role.DECODE)] if handover else [Fake("w0")]
    site = await start(*fakes, router={"transfer": handover, "disaggregate_above": 1})
    clients = [await site.client() for _ in range(5)]
    for client in clients:
        await client.send(b"POST /v1/chat/completions")  # not idle
    await eventually(lambda: len(site.wire.clients) == 5)
    for client in clients:
        with no_free_descriptors():
            answer = await client.ask(chat("x" * 100).removeprefix(b"POST /v1/chat/completions"))
            assert (answer.status, answer.error()["code"]) == (503, "router_full")
            assert answer.one(b"retry-after") == b"1"
            assert answer.one(b"connection") == b"close"
            assert await client.closed() == b""
    assert caplog.text.count("cannot open a connection to a worker") == 1
    assert site.metrics.connects_failed == 5
    assert site.metrics.retries == {}
    for fake in fakes:
        assert site.worker(fake.name).breaker.has_no_failures
    site.always(scripts.answer(200, b"{}"))
    assert (await site.ask(chat("x" * 100))).status == 200


async def test_idle_clients_are_closed_when_requests_need_their_descriptors(site: Site) -> None:
    idle, client = await site.client(), await site.client()
    for each in (idle, client):
        assert (await each.ask(get("/health"))).status == 200
    site.skip(1.0)
    with no_free_descriptors():
        assert (await client.ask(chat())).status == 503
        assert await idle.closed() == b""
    assert (await site.ask(chat())).status == 200


async def test_clients_are_accepted_once_descriptors_are_free(site: Site) -> None:
    early = await site.client()
    waiting = [socket.socket() for _ in range(3)]
    for raw in waiting:
        raw.setblocking(False)
    with no_free_descriptors():
        for raw in waiting:
            with contextlib.suppress(BlockingIOError):
                raw.connect(("127.0.0.1", site.port))
        await asyncio.sleep(0.1)  # accept fails in this time
        assert (await early.ask(get("/health"))).status == 200
    for raw in waiting:
        raw.close()
    assert (await site.ask(chat())).status == 200


async def test_blocks_are_released_when_the_decode_leg_gets_no_descriptor(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1)
    gate = here.hold("p0")
    client = await here.send(chat_body())
    await here.site.fakes["p0"].got(1)
    with no_free_descriptors():
        gate.set()
        assert (await client.answer()).status == 503
    await here.site.settled()
    # The release needs a connection too.
    ends = here.site.metrics.handovers.ends
    assert ends["prefilled"] == 1
    assert ends.get("released", 0) + ends.get("left_to_expire", 0) == 1
    here.left = len(here.kv.held)


def no_address_answers(*numbers: int) -> NoAddressAnswersError:
    """Return the error of a resolver whose addresses failed with these numbers."""
    return NoAddressAnswersError([OSError(number, os.strerror(number)) for number in numbers])


NO_PORT, NO_ROUTE, REFUSED = errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.ECONNREFUSED


@pytest.mark.parametrize(
    ("error", "is_local"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (no_address_answers(errno.EMFILE, REFUSED), True),
        (ConnectionRefusedError(REFUSED, "refused"), False),
        (OSError("[Errno 24] is text"), False),
        (UnicodeError(), False),
        (OSError(NO_PORT, "Cannot assign requested address"), True),
        (no_address_answers(NO_PORT, NO_PORT), True),
        (no_address_answers(NO_PORT, errno.EMFILE), True),
        (no_address_answers(NO_PORT, REFUSED), False),
        # Example: `::1` of localhost without IPv6.
        (no_address_answers(NO_PORT, NO_ROUTE), True),
        (OSError(NO_ROUTE, "Network is unreachable"), False),
        (no_address_answers(NO_ROUTE, NO_ROUTE), False),
    ],
)
def test_local_failures_are_recognised(error: Exception, is_local: bool) -> None:
    assert is_local_failure(error) is is_local


# Requests whose size was underestimated, on a worker with too short a context

SHORT = Fake("short", Role.SHORT, max_model_len=12288)
LONG = Fake("long", Role.LONG, max_model_len=131072)
TOO_LONG_ERRORS = [
    "This model's maximum context length is 12288 tokens. However, your prompt contains 15000 "
    "input tokens, which exceeds this limit even without any output tokens.",
    "The decoder prompt (length 15000) is longer than the maximum model length of 12288.",
]


async def short_and_long(start: Start, *more: Fake, **settings: float) -> Site:
    """Start a fleet in which a small request goes to the short worker, without retry budget."""
    return await start(SHORT, LONG, *more, router={"retry_budget": 0.0, **settings})


@pytest.mark.parametrize("message", TOO_LONG_ERRORS)
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_too_long_prompt_goes_to_a_larger_worker(
    start: Start, message: str, in_pieces: bool
) -> None:
    site = await short_and_long(start)
    head = scripts.head(400, (b"content-length", b"%d" % len(message)))
    whole = head + message.encode()
    dripping = scripts.raw(*(whole[at : at + 9] for at in range(0, len(whole), 9)), gap_s=0.001)
    site.fakes["short"].always(dripping if in_pieces else scripts.error(400, message))
    assert (await site.ask(chat(stream=True))).status == 200
    assert [call.connection.worker.name for call in site.served()] == ["short", "long"]
    assert site.served()[0].body == site.served()[1].body
    assert site.worker("short").breaker.has_no_failures


async def test_too_long_error_of_the_largest_worker_passes(start: Start) -> None:
    site = await short_and_long(start, Fake("middle", Role.GENERAL, max_model_len=16384))
    site.always(scripts.error(400, TOO_LONG_ERRORS[0]))
    site.fakes["long"].always(scripts.error(400, "maximum context length is 131072"))
    answer = await site.ask(chat())
    assert (answer.status, answer.error()["message"]) == (400, "maximum context length is 131072")
    limits = [site.worker(call.connection.worker.name).context_limit for call in site.served()]
    assert limits == sorted(set(limits))


async def test_too_long_prompt_waits_for_a_full_larger_worker(start: Start) -> None:
    full = Fake("long", Role.LONG, max_model_len=131072, max_requests=1)
    site = await start(SHORT, full, router={"policy": "length", "short_limit": 1000})
    site.fakes["short"].always(scripts.error(400, TOO_LONG_ERRORS[0]))
    site.fakes["long"].then(scripts.stall)
    first, second = await site.client(), await site.client()
    await first.send(chat("x" * 20_000))
    await eventually(lambda: site.fakes["long"].served)
    await second.send(chat())
    await eventually(lambda: site.router.queue.length == 1)
    first.close()
    assert (await second.answer()).status == 200


async def test_other_400_errors_are_not_retried(start: Start) -> None:
    site = await short_and_long(start)
    for message in ("no such role", "maximum context length".rjust(2 * MAX_ERROR_BYTES, "x")):
        site.fakes["short"].then(scripts.error(400, message, (b"x-detail", b"1")))
        answer = await site.ask(chat())
        assert (answer.status, answer.error()["message"]) == (400, message)
        assert answer.one(b"x-detail") == b"1"
    assert not site.fakes["long"].served


async def test_too_long_error_passes_without_a_healthy_larger_worker(start: Start) -> None:
    site = await short_and_long(start)
    site.fakes["short"].always(scripts.error(400, TOO_LONG_ERRORS[0]))
    site.fleet.health.record_failure(site.worker("long"), site.clock(), 60.0)
    answer = await site.ask(chat())
    assert (answer.status, answer.error()["message"]) == (400, TOO_LONG_ERRORS[0])
    assert len(site.served()) == 1

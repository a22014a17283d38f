"""A worker that fails before its answer has begun: another one gets the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from proxy.core.model.role import Role
from proxy.net.resolver import NoAddressAnswersError
from proxy.wire.exchange.attempt import MAX_ERROR_BYTES
from proxy.wire.worker.pool import is_local_failure
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.pairs import chat_body, pairs
from tests.proxy.wire.raw_client import Answer, chat, get, request
from tests.proxy.wire.site import Fake, Site, eventually

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
FAILURES: dict[str, Script] = {
    "reset": scripts.reset,
    "close": scripts.hang_up,
    "half a head": scripts.raw(HEAD, end="reset"),
    "half a head, closed": scripts.raw(HEAD, end="close"),
    "a head alone": scripts.raw(HEAD + b"Content-Length: 9\r\n\r\n", end="reset"),
    "a head alone, closed": scripts.raw(HEAD + b"Content-Length: 9\r\n\r\n", end="close"),
    "a stream's head alone": scripts.stream(0, end="reset"),
    "500": scripts.error(500),
    "502": scripts.error(502),
    "503": scripts.error(503),
    "504": scripts.error(504),
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
    """Fail whoever is asked first, and let all others serve."""
    asked: list[Call] = []

    async def run(call: Call) -> None:
        asked.append(call)
        if len(asked) == 1:
            await script(call)
        else:
            await scripts.obey(call.connection.worker.name)(call)

    return run


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAILURES)
async def test_another_worker_gets_the_same_request(start: Start, name: str, stream: bool) -> None:
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

    def passed(call: Call) -> list[tuple[bytes, bytes]]:
        return [pair for pair in call.headers if pair[0] != b"host"]

    assert passed(first) == passed(second)


async def test_one_that_breaks_off_while_the_request_is_sent_is_replaced(start: Start) -> None:
    """It reads a part of the body and resets."""
    site = await start(Fake("w0"), Fake("w1"))
    for name, fake in site.fakes.items():
        fake.cut_after = 100_000
        site.worker(name).max_model_len = None
    site.fakes["w0"].cuts_left = 1
    body = b'{"model": "tiny", "prompt": "%s", "max_tokens": 1}' % (b"x" * 3_000_000)
    for _ in range(2):
        assert (await site.ask(request(body, path="/v1/completions"))).status == 200
    assert site.fakes["w0"].cuts_left == 0


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_a_worker_that_can_not_be_reached_is_replaced(start: Start, how: str) -> None:
    site = await start(
        Fake("w0"), Fake("w1"), router={"policy": "round_robin"}, wire={"connect_s": 0.2}
    )
    fake = site.fakes["w0"]
    await (fake.refuse() if how == "refuses" else fake.hang())
    for _ in range(4):
        assert (await site.ask(chat())).status == 200
    assert len(site.fakes["w1"].served) == 4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 415, 422, 499, 501, 505])
async def test_an_answer_that_blames_the_request_is_final(start: Start, status: int) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.error(status, "your own fault", (b"x-detail", b"1")))
    answer = await site.ask(chat())
    assert answer.status == status
    assert answer.json()["error"]["message"] == "your own fault"
    assert answer.one(b"x-detail") == b"1"
    assert len(site.served()) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
async def test_when_all_fail_the_last_answer_passes_on(start: Start, status: int) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    for name, fake in site.fakes.items():
        fake.always(scripts.error(status, f"{name} is ill", (b"x-detail", name.encode())))
    answer = await site.ask(chat())
    assert answer.status == status
    last = site.served()[-1].connection.worker.name
    assert answer.json()["error"]["message"] == f"{last} is ill"
    assert answer.one(b"x-detail") == last.encode()
    assert len(site.served()) == 2


@pytest.mark.parametrize(
    ("script", "status"),
    [(scripts.reset, 502), (scripts.hang_up, 502), (scripts.stall, 504)],
    ids=["reset", "close", "stall"],
)
async def test_without_any_answer_it_is_a_502(start: Start, script: Script, status: int) -> None:
    site = await start(Fake("w0"), Fake("w1"), wire={"first_byte_s": 0.2})
    site.always(script)
    client = await site.client()
    answer = await client.ask(chat())
    assert answer.status == status
    assert answer.error()["type"] == "server_error"
    assert len(site.served()) == 2
    site.always(scripts.obey("well"))
    assert (await client.ask(chat())).status == 200  # the client's connection lives on


DEADLY = "this request ends its worker"


def deadly(end: Script) -> Script:
    """End so whatever contains `DEADLY`, and serve the rest."""

    async def run(call: Call) -> None:
        await (end if DEADLY.encode() in call.body else scripts.obey("well"))(call)

    return run


def sent(site: Site) -> list[str]:
    """Name the workers that a deadly request was sent to."""
    return [call.connection.worker.name for call in site.served() if DEADLY.encode() in call.body]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("warm", [True, False], ids=["reused", "fresh"])
@pytest.mark.parametrize("name", ["reset", "close", "half a head", "a stream's head alone"])
async def test_two_drops_end_a_request(start: Start, name: str, warm: bool, stream: bool) -> None:
    """It may be what makes them fail. No connection of either gets it a second time."""
    site = await start(*(Fake(f"w{n}") for n in range(5)), router={"max_attempts": 5})
    site.always(deadly(FAILURES[name]))
    client = await site.client()
    while warm and not all(fake.open for fake in site.fakes.values()):
        await asyncio.gather(*(site.ask(chat()) for _ in range(10)))
    answer = await client.ask(chat(DEADLY, stream=stream))
    assert len(sent(site)) == len(set(sent(site))) == 2
    assert (answer.status, answer.error()["code"]) == (502, "request_dropped")
    assert "Two workers" in answer.error()["message"]
    assert answer.one(b"x-should-retry") == b"false"
    assert answer.all(b"retry-after") == []
    assert (await client.ask(chat())).status == 200
    await site.settled()


@pytest.mark.parametrize("spares", ["takes no connection", "is busy"])
async def test_a_worker_that_never_began_did_not_drop_it(start: Start, spares: str) -> None:
    fakes = [Fake(f"w{n}") for n in range(4)]
    site = await start(*fakes, router={"policy": "round_robin", "max_attempts": 4})
    for name in ("w0", "w2"):
        if spares == "is busy":
            site.fakes[name].always(deadly(scripts.error(503)))
        else:
            await site.fakes[name].refuse()
    site.fakes["w1"].always(deadly(scripts.reset))
    assert (await site.ask(chat(DEADLY))).status == 200
    assert sent(site)[-1] == "w3"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("warm", [True, False], ids=["reused", "fresh"])
@pytest.mark.parametrize("end", [scripts.reset, scripts.hang_up])
async def test_two_drops_end_a_leg(start: Start, end: Script, warm: bool, role: Role) -> None:
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
    hit = [name for name in sent(here.site) if name.startswith(role.value[0])]
    assert len(hit) == len(set(hit)) == 2
    await here.site.settled()


async def crowd(site: Site, size: int) -> list[asyncio.Task[Answer]]:
    """Ask so much at once that is not streamed, and wait until workers have all of it."""
    asking = [asyncio.create_task(site.ask(chat(f"q{n}"), within=20.0)) for n in range(size)]
    await eventually(lambda: len(site.served()) == size, within=10.0)
    return asking


async def test_where_the_budget_is_spent_a_client_hears_when_to_come_back(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.reset)
    budget, later = site.router._retries, site.clock() + 600.0
    while budget.spend(later):
        pass
    answer = await site.ask(chat())
    assert (answer.status, answer.one(b"retry-after")) == (502, b"1")
    assert "too many" in answer.error()["message"]


async def test_without_a_budget_nothing_is_tried_again(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), router={"retry_budget": 0.0})
    site.always(scripts.error(500))
    assert (await site.ask(chat())).status == 500
    assert len(site.served()) == 1


async def test_a_retry_says_so_when_asked(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(first_fails(scripts.reset))
    answer = await site.ask(chat("hi", b"X-Explain: 1"))
    assert b"reason=retry" in answer.one(b"x-route")
    assert answer.one(b"x-route").startswith(site.served()[1].connection.worker.name.encode())


# What is the router's own fault


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no further file or socket."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)  # the lowest number that is not in use
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_router_without_room_for_a_connection_blames_no_worker(
    start: Start, caplog: pytest.LogCaptureFixture, handed_over: bool
) -> None:
    fakes = [Fake("p0", Role.PREFILL), Fake("d0", Role.DECODE)] if handed_over else [Fake("w0")]
    site = await start(*fakes, router={"transfer": handed_over, "disaggregate_above": 1})
    client = await site.client()
    assert (await client.ask(get("/health"))).status == 200  # it is connected
    with no_more_files():
        for _ in range(5):
            answer = await client.ask(chat("x" * 100))
            assert (answer.status, answer.error()["code"]) == (503, "router_full")
            assert answer.one(b"retry-after") == b"1"
    assert caplog.text.count("cannot open a connection to a worker") == 1
    assert site.metrics.connects_failed == 5
    assert site.metrics.retries == {}
    for fake in fakes:
        assert site.worker(fake.name).breaker.has_no_failures
    site.always(scripts.answer(200, b"{}"))
    assert (await client.ask(chat("x" * 100))).status == 200
    await site.settled()


async def test_clients_are_accepted_again_once_files_are_free(start: Start) -> None:
    site = await start()
    early = await site.client()
    waiting = [socket.socket() for _ in range(3)]
    for raw in waiting:
        raw.setblocking(False)
    with no_more_files():
        for raw in waiting:
            with contextlib.suppress(BlockingIOError):
                raw.connect(("127.0.0.1", site.port))
        await asyncio.sleep(0.1)  # in which the loop fails to accept them
        assert (await early.ask(get("/health"))).status == 200
    for raw in waiting:
        raw.close()
    assert (await site.ask(chat())).status == 200
    await site.settled()


async def test_blocks_are_released_without_room_for_a_decode_leg(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1)
    fake, rest = here.site.fakes["p0"], asyncio.Event()
    usual = here.kv.worker(fake, "prefill")

    async def prefill(call: Call) -> None:
        await rest.wait()
        await usual(call)

    fake.then(prefill)
    client = await here.send(chat_body())
    await fake.got(1)
    with no_more_files():
        rest.set()
        assert (await client.answer()).status == 503
    await here.site.settled()
    # To give them back takes a connection too.
    ends = here.site.metrics.handovers.ends
    assert ends["prefilled"] == 1
    assert ends.get("released", 0) + ends.get("left_to_expire", 0) == 1


def failed(*numbers: int) -> NoAddressAnswersError:
    return NoAddressAnswersError([OSError(number, os.strerror(number)) for number in numbers])


def test_which_errors_are_our_own() -> None:
    assert is_local_failure(OSError(errno.EMFILE, "Too many open files"))
    assert is_local_failure(failed(errno.EMFILE, errno.ECONNREFUSED))
    assert not is_local_failure(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
    assert not is_local_failure(OSError("[Errno 24] is what somebody wrote"))
    assert not is_local_failure(UnicodeError())


def test_an_address_that_nothing_leads_to_is_no_lack_of_ports() -> None:
    """As `::1` of localhost where there is no IPv6, and nobody listens on 127.0.0.1."""
    no_port, no_way = errno.EADDRNOTAVAIL, errno.ENETUNREACH
    assert is_local_failure(failed(no_port, no_way))
    assert not is_local_failure(OSError(no_way, "Network is unreachable"))
    assert not is_local_failure(failed(no_way, no_way))
    assert is_local_failure(OSError(no_port, "Cannot assign requested address"))
    assert is_local_failure(failed(no_port, no_port))
    assert not is_local_failure(failed(no_port, errno.ECONNREFUSED))
    assert is_local_failure(failed(no_port, errno.EMFILE))


# A worker whose context is too short, by an estimate that was too low

SHORT = Fake("short", Role.SHORT, max_model_len=12288)
LONG = Fake("long", Role.LONG, max_model_len=131072)
WORDS = [
    "This model's maximum context length is 12288 tokens. However, your prompt contains 15000 "
    "input tokens, which exceeds this limit even without any output tokens.",
    "The decoder prompt (length 15000) is longer than the maximum model length of 12288.",
]


async def short_and_long(start: Start, *more: Fake, **settings: float) -> Site:
    """Start a fleet in which a small request goes to the short worker; no retry is granted."""
    return await start(SHORT, LONG, *more, router={"retry_budget": 0.0, **settings})


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_larger_worker_is_asked(start: Start, words: str, stream: bool) -> None:
    site = await short_and_long(start)
    site.fakes["short"].always(scripts.error(400, words))
    answer = await site.ask(chat(stream=stream))
    assert answer.status == 200
    assert [call.connection.worker.name for call in site.served()] == ["short", "long"]
    assert site.served()[0].body == site.served()[1].body
    assert site.worker("short").breaker.has_no_failures


async def test_it_is_asked_though_the_refusal_comes_in_pieces(start: Start) -> None:
    site = await short_and_long(start)
    head = scripts.head(400, (b"content-type", b"application/json"), (b"content-length", b"40"))
    site.fakes["short"].always(scripts.drip(head + b"maximum context length".ljust(40)))
    assert (await site.ask(chat())).status == 200


async def test_the_largest_has_the_last_word(start: Start) -> None:
    site = await short_and_long(start, Fake("middle", Role.GENERAL, max_model_len=16384))
    site.always(scripts.error(400, WORDS[0]))
    site.fakes["long"].always(scripts.error(400, "maximum context length is 131072"))
    answer = await site.ask(chat())
    assert (answer.status, answer.error()["message"]) == (400, "maximum context length is 131072")
    limits = [site.worker(call.connection.worker.name).limit for call in site.served()]
    assert limits == sorted(set(limits))


async def test_it_waits_for_one_that_is_full(start: Start) -> None:
    full = Fake("long", Role.LONG, max_model_len=131072, max_requests=1)
    site = await start(SHORT, full, router={"policy": "length", "short_limit": 1000})
    site.fakes["short"].always(scripts.error(400, WORDS[0]))
    site.fakes["long"].then(scripts.stall)
    first, second = await site.client(), await site.client()
    await first.send(chat("x" * 20_000))
    await eventually(lambda: site.fakes["long"].served)
    await second.send(chat())
    await eventually(lambda: site.router.queue.length == 1)
    first.close()
    assert (await second.answer()).status == 200


async def test_what_else_is_refused_is_final(start: Start) -> None:
    site = await short_and_long(start)
    for words in ("no such role", "maximum context length".rjust(2 * MAX_ERROR_BYTES, "x")):
        site.fakes["short"].then(scripts.error(400, words, (b"x-detail", b"1")))
        answer = await site.ask(chat())
        assert (answer.status, answer.error()["message"]) == (400, words)
        assert answer.one(b"x-detail") == b"1"
    assert not site.fakes["long"].served


async def test_where_nobody_larger_is_well_the_refusal_passes_on(start: Start) -> None:
    site = await short_and_long(start)
    site.fakes["short"].always(scripts.error(400, WORDS[0]))
    site.fleet.health.failed(site.worker("long"), site.clock(), 60.0)
    answer = await site.ask(chat())
    assert (answer.status, answer.error()["message"]) == (400, WORDS[0])
    assert len(site.served()) == 1
